"""Trainer ranks that a scheduler starts: they train, and whatever dies or stops, all end and the cause is named."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import anyio
import anyio.to_thread
import pytest

from agentrl.algo.config import AlgorithmConfig
from agentrl.errors import TrainerDied
from agentrl.processes.base import TOKEN_VARIABLE
from agentrl.processes.config import ClusterConfig
from agentrl.trainer.config import TrainerConfig
from agentrl.trainer.worker.client import RemoteTrainer, launch_trainer
from agentrl.trainer.worker.ranks import WORKER_MODULE
from tests.support.ports import later_port
from tests.trainer.helpers import random_batch

pytestmark = [pytest.mark.starts, pytest.mark.long, pytest.mark.parametrize("anyio_backend", ["asyncio"])]

TOKEN = "a secret of this test alone"
DRIVER = """
import sys, anyio
from tests.processes.test_attach import drive
anyio.run(drive, sys.argv[1], sys.argv[2], int(sys.argv[3]))
"""


@contextmanager
def two_ranks(port: int, folder: Path) -> Generator[list[subprocess.Popen[bytes]]]:
    """Start two ranks as torchrun would."""
    command = [sys.executable, "-m", WORKER_MODULE, "--attach", f"127.0.0.1:{port}"]
    ranks: list[subprocess.Popen[bytes]] = []
    for rank in range(2):
        numbers = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), TOKEN_VARIABLE: TOKEN}
        with (folder / f"rank-{rank}.log").open("wb") as log:
            ranks.append(subprocess.Popen(command, env={**os.environ, **numbers}, stderr=log))
    try:
        yield ranks
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


@asynccontextmanager
async def trainer_of(
    port: int, checkpoint: Path, folder: Path, collective_timeout_s: float = 600.0
) -> AsyncGenerator[RemoteTrainer]:
    config = TrainerConfig.model_validate(
        {"device": "cpu", "lr": 1e-3, "parallel": {"dp": 2}, "collective_timeout_s": collective_timeout_s}
    )
    cluster = ClusterConfig(launcher="attach", listen=f"127.0.0.1:{port}")
    log = folder / "trainer.log"
    async with launch_trainer(
        config, AlgorithmConfig(), model_path=checkpoint, total_steps=10, seed=5, log_path=log, cluster=cluster
    ) as trainer:
        yield trainer


async def drive(checkpoint: str, folder: str, port: int) -> None:
    """Train until killed; a driver process of its own runs this."""
    async with trainer_of(port, Path(checkpoint), Path(folder)) as trainer:
        (Path(folder) / "ready").touch()
        while True:
            await trainer.step(random_batch(version=1, samples=7))


async def codes(ranks: list[subprocess.Popen[bytes]]) -> list[int]:
    """Return the exit codes, once all have ended, waiting at most a minute: a busy machine tears down slowly."""
    return [await anyio.to_thread.run_sync(rank.wait, 60) for rank in ranks]


async def test_ranks_that_attach_train_and_end_with_the_trainer(
    tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch, anyio_backend: str
) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    port = later_port()
    with two_ranks(port, tmp_path) as ranks:
        async with trainer_of(port, checkpoint, tmp_path) as trainer:
            assert (await trainer.step(random_batch(version=1, samples=7))).skipped is None
            await trainer.save(str(tmp_path / "step-1"))
            assert trainer.pids == tuple(rank.pid for rank in ranks)
        assert await codes(ranks) == [0, 0]  # in order, so the scheduler starts none again
    assert TOKEN not in "".join((tmp_path / f"rank-{rank}.log").read_text() for rank in range(2))


async def test_a_killed_rank_is_named_and_the_other_ends(
    tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch, anyio_backend: str
) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    port = later_port()
    with two_ranks(port, tmp_path) as ranks:
        async with trainer_of(port, checkpoint, tmp_path) as trainer:
            os.kill(ranks[1].pid, signal.SIGKILL)  # at rest
            assert await codes(ranks) == [1, -signal.SIGKILL]  # the scheduler starts rank 0 again
            with pytest.raises(TrainerDied, match=rf"rank 1 \(.*pid {ranks[1].pid}\): its connection closed"):
                await trainer.step(random_batch(version=1, samples=7))


async def test_a_stopped_rank_is_named_as_the_cause_of_the_collective_that_fails(
    tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, anyio_backend: str
) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    port = later_port()
    with two_ranks(port, tmp_path) as ranks:
        async with trainer_of(port, checkpoint, tmp_path, collective_timeout_s=20) as trainer:
            await trainer.step(random_batch(version=1, samples=7))
            os.kill(ranks[1].pid, signal.SIGSTOP)
            named = rf"rank 1 \(.*pid {ranks[1].pid}\) had given no sign of life for \d+ s: .* hung, so it was killed"
            with pytest.raises(TrainerDied, match=named):
                await trainer.step(random_batch(version=1, samples=7))
            os.kill(ranks[1].pid, signal.SIGCONT)
            assert await codes(ranks) == [1, 1]
    assert f"pid {ranks[1].pid}) has given no sign of life" in caplog.text


async def test_ranks_end_with_a_killed_driver_also_inside_a_step(
    tmp_path: Path, checkpoint: Path, anyio_backend: str
) -> None:
    port = later_port()
    command = [sys.executable, "-c", DRIVER, str(checkpoint), str(tmp_path), str(port)]
    with two_ranks(port, tmp_path) as ranks:
        driver = subprocess.Popen(  # noqa: ASYNC220 - its start does not wait
            command, env={**os.environ, TOKEN_VARIABLE: TOKEN}, cwd=Path(__file__).parents[2]
        )
        try:
            with anyio.fail_after(300):
                while not (tmp_path / "ready").exists():  # noqa: ASYNC110 - another process's progress is observed
                    await anyio.sleep(0.1)
        finally:
            driver.kill()
            driver.wait()
        assert await codes(ranks) == [1, 1]
