"""A rank that gives no sign of life is named, and ended where its peers would fail; one that works silently is not."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager
from itertools import chain, count, repeat
from pathlib import Path

import anyio
import pytest

from agentrl.errors import TrainerDied
from agentrl.processes.base import ProcessSpec
from agentrl.processes.frames import EMPTY_FRAME
from agentrl.processes.link import LifeSigns, Silences, SilenceWords
from agentrl.processes.machine import pulse
from agentrl.processes.start import local_links
from agentrl.support.concurrency import task_group
from agentrl.trainer.worker.client import RemoteTrainer
from agentrl.trainer.worker.ranks import TrainerRanks
from tests.support.processes import until_ended

pytestmark = pytest.mark.starts

_SILENT = "import sys; sys.stdin.buffer.read()"
_BEATS = f"import sys, time; out = sys.stdout.buffer\nwhile True: out.write({EMPTY_FRAME!r}); out.flush(); time.sleep(0.01)"
_LONG = 3600.0


class _Rank:
    """A rank without a process, whose pulse is given."""

    def __init__(self, pulses: Iterator[int | None]) -> None:
        self.where = "pid 1"
        self.signs = LifeSigns()
        self.looks = 0
        self._pulses = pulses

    def pulse(self) -> int | None:
        self.looks += 1
        return next(self._pulses)


async def _lost(rank: _Rank, *, number: int = 0, request: bool = True) -> str | None:
    """Return why the rank is lost after 0.01 s; None: it is not while it is looked at 60 times."""
    lost: list[str] = []
    ranks = [rank] if number == 0 else [_Rank(repeat(None)), rank]
    words = SilenceWords(names=[f"rank {number}" for number in range(len(ranks))], owner="the trainer")
    silences = Silences(ranks, words, silent_s=0.01, lost_s=0.01, on_lost=lambda _, reason: lost.append(reason))
    async with task_group() as tasks:

        async def follow() -> None:
            await silences.follow(number)
            tasks.cancel_scope.cancel()

        tasks.start_soon(follow)
        if request:
            with silences.working("working", _LONG):
                while rank.looks < 60:  # noqa: ASYNC110 - the looks are what is counted
                    await anyio.sleep(0.001)
        else:
            while rank.looks < 60:  # noqa: ASYNC110
                await anyio.sleep(0.001)
        tasks.cancel_scope.cancel()
    return lost[0] if lost else None


async def test_a_rank_that_neither_speaks_nor_works_is_lost() -> None:
    for still in (None, 7):
        assert "had given no sign of life for 0 s: it was stopped or hung, so it was killed" in str(
            await _lost(_Rank(repeat(still)))
        )


async def test_a_rank_that_works_without_a_word_is_not_lost_until_it_stops() -> None:
    assert await _lost(_Rank(count())) is None
    stops = _Rank(chain(range(30), repeat(30)))
    assert await _lost(stops) is not None
    assert stops.looks > 30


async def test_a_rank_at_rest_is_reported_and_not_lost(caplog: pytest.LogCaptureFixture) -> None:
    assert await _lost(_Rank(repeat(None)), number=1, request=False) is None
    assert "the trainer rank 1 (pid 1) has given no sign of life for 0.01 s: it is stopped or hangs" in caplog.text


async def test_a_process_that_works_has_a_pulse_and_a_stopped_one_has_none() -> None:
    async with await anyio.open_process([sys.executable, "-c", "while True: pass"]) as busy:
        with anyio.fail_after(300):
            first = pulse(busy.pid)
            while pulse(busy.pid) == first:  # noqa: ASYNC110 - nothing tells that another process has worked
                await anyio.sleep(0.01)
            os.kill(busy.pid, signal.SIGSTOP)
            while pulse(busy.pid) is not None:  # noqa: ASYNC110 - nor that it has stopped
                await anyio.sleep(0.01)
        busy.kill()
    assert pulse(busy.pid) is None


@asynccontextmanager
async def _impostors(programs: tuple[str, str], folder: Path) -> AsyncGenerator[RemoteTrainer]:
    specs = [
        ProcessSpec(
            name=f"rank {number}",
            role="trainer",
            command=(sys.executable, "-c", program),
            environment={},
            log_path=folder / f"{number}.log",
        )
        for number, program in enumerate(programs)
    ]
    async with (
        local_links(specs) as ranks,
        TrainerRanks.watching(ranks, silent_s=0.05, lost_s=1.5) as processes,
        RemoteTrainer.connected(processes, _LONG) as trainer,
    ):
        yield trainer


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.parametrize("frozen", [0, 1])
async def test_a_frozen_rank_of_two_is_named_and_both_end(
    tmp_path: Path, frozen: int, caplog: pytest.LogCaptureFixture
) -> None:
    programs = (_SILENT, _BEATS) if frozen == 0 else (_BEATS, _BEATS)
    async with _impostors(programs, tmp_path) as trainer:
        os.kill(trainer.pids[frozen], signal.SIGSTOP)
        named = (
            rf"while saving x; rank {frozen} \(pid {trainer.pids[frozen]}\) had given no sign of life .* so it was killed"
        )
        with pytest.raises(TrainerDied, match=named):
            await trainer.save("x")
        for pid in trainer.pids:
            await until_ended(pid)
    warnings = [record.getMessage() for record in caplog.records]
    silent = f"the trainer rank {frozen} (pid {trainer.pids[frozen]}) has given no sign of life for 0.05 s"
    limit = "at most 1.5 s (trainer.collective_timeout_s)"
    assert f"{silent} while saving x: it is stopped or hangs; the run waits for it, {limit}" in warnings
