"""A trainer of two real processes: it trains, survives errors of one rank, and ends as a whole when one dies."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import numpy as np
import pytest
import torch

from agentrl.algo.config import AlgorithmConfig
from agentrl.errors import ConfigError, TrainerDied, TrainError
from agentrl.processes.base import ProcessSpec
from agentrl.processes.start import local_links
from agentrl.support.concurrency import task_group
from agentrl.trainer.config import TrainerConfig
from agentrl.trainer.worker.client import RemoteTrainer, launch_trainer
from agentrl.trainer.worker.place import RankPlace
from agentrl.trainer.worker.ranks import TrainerRanks
from agentrl.weights.disk import verify_directory
from tests.support.cli import child_commands, children
from tests.support.processes import listening_addresses
from tests.trainer.helpers import random_batch

_CONFIG = TrainerConfig.model_validate({"lr": 1e-3, "parallel": {"dp": 2}})


@asynccontextmanager
async def _trainer(checkpoint: Path, folder: Path, config: TrainerConfig = _CONFIG) -> AsyncGenerator[RemoteTrainer]:
    log = folder / "logs" / "trainer.log"
    algorithm = AlgorithmConfig()
    async with launch_trainer(config, algorithm, model_path=checkpoint, total_steps=10, seed=5, log_path=log) as trainer:
        yield trainer


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.starts
@pytest.mark.slow
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.usefixtures("starts_truly")
async def test_two_processes_train_publish_and_save_and_end_when_one_dies(tmp_path: Path, checkpoint: Path) -> None:
    ids = np.arange(1, 20, dtype=np.int32)
    async with _trainer(checkpoint, tmp_path) as trainer:
        report = await trainer.step(random_batch(version=1, samples=7))
        assert report.skipped is None
        for pid in trainer.pids:
            assert listening_addresses(pid) == {"127.0.0.1"}
        publication = await trainer.publish(1, str(tmp_path / "weights"))
        assert verify_directory(Path(publication.path)) == publication
        [before] = await trainer.logprobs([ids])

        (tmp_path / "file").write_text("")
        await trainer.save(str(tmp_path / "file" / "step-1"))
        with pytest.raises(TrainError, match="file"):  # rank 0 cannot write; rank 1 does not wait for it
            await trainer.finish_save(wait=True)
        await trainer.save(str(tmp_path / "step-1"), "a note")
        await trainer.step(random_batch(version=1, seed=1, samples=7))
        await trainer.finish_save(wait=True)
        assert (await trainer.restore(str(tmp_path / "step-1"))).note == "a note"
        [after] = await trainer.logprobs([ids])
        np.testing.assert_array_equal(before, after)

        os.kill(trainer.pids[1], signal.SIGKILL)
        with pytest.raises(TrainerDied, match=r"rank 1 \(pid \d+\): signal SIGKILL; the end of .*trainer-1\.log"):
            await trainer.step(random_batch(version=1, samples=7))
    assert len(trainer.pids) == 2
    assert not any(map(_is_alive, trainer.pids))


@pytest.mark.starts
@pytest.mark.long
@pytest.mark.usefixtures("starts_truly")
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.parametrize("rank", [0, 1])
async def test_a_rank_that_is_stopped_while_it_starts_is_named_within_the_timeout(
    tmp_path: Path, checkpoint: Path, rank: int
) -> None:
    fields = {"parallel": {"dp": 2}, "collective_timeout_s": 25, "call_timeout_s": 3600}
    before = set(children(os.getpid()))

    async def stop() -> None:
        found: list[int] = []
        while not found:
            await anyio.sleep(0.01)
            found = [pid for pid, line in child_commands(os.getpid()).items() if f"--rank={rank}" in line]
        os.kill(found[0], signal.SIGSTOP)

    async with task_group() as tasks:
        tasks.start_soon(stop)
        with pytest.raises(TrainerDied, match=rf"rank {rank} \(pid \d+\) had given no sign of life for \d+ s") as caught:
            async with _trainer(checkpoint, tmp_path, TrainerConfig.model_validate(fields)):
                raise AssertionError("unreachable: a rank is stopped")
    assert len(str(caught.value).splitlines()) == 1
    assert set(children(os.getpid())) <= before


# Both wait at a pipe for each other; then the cause waits until the other one has ended.
_LOSES_ANOTHER = (
    "import os, sys; kept = os.open('{pipe}', os.O_WRONLY); sys.stdin.close(); "
    "sys.exit('RuntimeError: Connection closed by peer [127.0.0.1]:1')"
)
_IS_KILLED = "import os; open('one').read(); os.kill(os.getpid(), 9)"
_HAS_A_BUG = "import sys; open('one').read(); open('two').read(); sys.exit('ValueError: a bug')"


@pytest.mark.starts
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.parametrize(
    ("cause", "third", "named"),
    [
        (_IS_KILLED, "import sys; sys.stdin.read()", "signal SIGKILL"),  # the third is killed
        (_HAS_A_BUG, _LOSES_ANOTHER.format(pipe="two"), "exit code 1.*ValueError: a bug"),  # all end before they are judged
    ],
)
async def test_the_cause_is_shown_and_not_the_rank_that_lost_its_connection_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cause: str, third: str, named: str
) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkfifo("one")
    os.mkfifo("two")
    specs = [
        ProcessSpec(
            name=f"rank {number}",
            role="trainer",
            command=(sys.executable, "-c", program),
            environment={},
            log_path=tmp_path / f"{number}.log",
        )
        for number, program in enumerate([_LOSES_ANOTHER.format(pipe="one"), cause, third])
    ]
    async with local_links(specs) as ranks, TrainerRanks.watching(ranks, grace_s=300) as processes:
        with anyio.fail_after(300):
            await ranks[2].ended()
        assert re.match(rf"rank 1 \(pid \d+\): {named}", await processes.obituary(), re.DOTALL)


def test_a_gpu_that_is_missing_is_an_error_on_every_rank() -> None:
    here = torch.cuda.device_count()
    message = f"trainer.parallel: {here + 2} GPUs from cuda:0 are needed, this machine has {here}; lower dp"
    for rank in range(2):
        with pytest.raises(ConfigError, match=message):
            RankPlace(rank=rank, world=here + 2, store="s").device_of(torch.device("cuda"))


@pytest.mark.starts
@pytest.mark.slow
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_model_that_cannot_be_loaded_is_one_error_and_all_processes_end(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="cannot be loaded as a causal language model"):
        async with _trainer(tmp_path / "model", tmp_path):
            raise AssertionError("unreachable: the model cannot be loaded")
    for log in (tmp_path / "logs").iterdir():
        assert "Traceback" not in log.read_text()
