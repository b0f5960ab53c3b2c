"""The trainer worker as a real process, and what its driver does when it misbehaves."""

from __future__ import annotations

import logging
import os
import resource
import signal
import sys
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
import torch

from agentrl.algo.config import AlgorithmConfig
from agentrl.errors import ConfigError, InvariantError, StaleDataError, TrainError
from agentrl.processes.base import ProcessSpec
from agentrl.processes.frames import EMPTY_FRAME, framed
from agentrl.processes.start import local_links
from agentrl.trainer.base import TrainBatch, TrainSample
from agentrl.trainer.config import TrainerConfig
from agentrl.trainer.model import PolicyModel
from agentrl.trainer.policy import PolicyTrainer
from agentrl.trainer.worker.client import RemoteTrainer, launch_trainer
from agentrl.trainer.worker.protocol import SaveBegun, encode
from agentrl.trainer.worker.ranks import TrainerRanks
from agentrl.weights.disk import verify_directory
from tests.support.cli import children
from tests.trainer.helpers import load_plain, random_batch

pytestmark = pytest.mark.starts

_CONFIG = TrainerConfig(lr=1e-3, minibatches=2, max_bad_steps=2, call_timeout_s=120)
_IDS = np.arange(30, dtype=np.int32)

# Starting a worker takes seconds; the tests with an impostor cover both loops.
_ASYNCIO = pytest.mark.parametrize("anyio_backend", ["asyncio"])

_SILENT = "import sys; sys.stdin.buffer.read()"
_DIES = "import sys; sys.stdin.buffer.read(20); sys.exit('no more memory')"
_PRINTS = "import sys; sys.stdin.buffer.read(20); print('hello, this is no frame', flush=True); sys.stdin.read()"
_BEATS_LATE = (
    "import sys; sys.stdin.buffer.read(20); out = sys.stdout.buffer; "
    f"open('first').readline(); out.write({EMPTY_FRAME!r}); out.flush(); open('beaten', 'w').close(); "
    f"open('second').readline(); out.write({framed(encode(SaveBegun(), 1))!r}); out.flush(); sys.stdin.read()"
)
_LONG_NAME = "a long name, so that twenty bytes are there"


class _Acts(logging.Handler):
    """Calls one action at each record; on a busy machine there may be more records."""

    def __init__(self, actions: Sequence[Callable[[], object]]) -> None:
        super().__init__()
        self._actions = iter(actions)

    def emit(self, record: logging.LogRecord) -> None:
        next(self._actions, int)()


@contextmanager
def _acting_on_records(*actions: Callable[[], object]) -> Generator[None]:
    handler = _Acts(actions)
    logging.getLogger("agentrl.processes").addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger("agentrl.processes").removeHandler(handler)


@contextmanager
def _named_pipe(name: str) -> Generator[Callable[[], object]]:
    """Yield a function that writes a line to a named pipe, without waiting for its reader."""
    os.mkfifo(name)
    pipe = os.open(name, os.O_RDWR)
    try:
        yield partial(os.write, pipe, b"\n")
    finally:
        os.close(pipe)


@asynccontextmanager
async def _worker(checkpoint: Path, folder: Path) -> AsyncGenerator[RemoteTrainer]:
    async with launch_trainer(
        _CONFIG, AlgorithmConfig(), model_path=checkpoint, total_steps=10, seed=5, log_path=folder / "logs" / "trainer.log"
    ) as trainer:
        yield trainer


@asynccontextmanager
async def _impostor(
    program: str, folder: Path, timeout_s: float = 300.0, silent_s: float = 300.0
) -> AsyncGenerator[RemoteTrainer]:
    spec = ProcessSpec(
        name="impostor", role="trainer", command=(sys.executable, "-c", program), environment={}, log_path=folder / "log"
    )
    async with (
        local_links([spec]) as ranks,
        TrainerRanks.watching(ranks, silent_s=silent_s) as processes,
        RemoteTrainer.connected(processes, timeout_s) as trainer,
    ):
        yield trainer


async def _saved(trainer: RemoteTrainer, directory: Path) -> None:
    await trainer.save(str(directory))
    await trainer.finish_save(wait=True)


def _poisoned() -> TrainBatch:
    batch = random_batch()
    samples = tuple(
        TrainSample(sample=item.sample, advantages=np.full_like(item.advantages, np.nan)) for item in batch.samples
    )
    return replace(batch, samples=samples)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@_ASYNCIO
@pytest.mark.usefixtures("starts_truly")
async def test_a_worker_trains_publishes_saves_and_restores_like_the_trainer_in_this_process(
    tmp_path: Path, checkpoint: Path
) -> None:
    model = PolicyModel(checkpoint, device=torch.device("cpu"))
    local = PolicyTrainer(model, _CONFIG, AlgorithmConfig(), total_steps=10, seed=5)
    async with _worker(checkpoint, tmp_path) as trainer:
        assert (trainer.device, trainer.num_parameters) == ("cpu", 30048)
        report = await trainer.step(random_batch(version=1))
        expected = local.step(random_batch(version=1))
        timeless = [{k: v for k, v in r.metrics.items() if not k.startswith("seconds")} for r in (report, expected)]
        assert timeless[0] == timeless[1]
        assert report.skipped is None

        os.kill(trainer.pid, signal.SIGINT)  # a Ctrl-C in the terminal reaches it too
        publication = await trainer.publish(1, str(tmp_path / "weights"))
        assert verify_directory(Path(publication.path)) == publication
        published = dict(load_plain(Path(publication.path)).named_parameters())
        assert all(torch.equal(published[name], parameter) for name, parameter in local.model.parameters.items())
        [ours], [theirs] = await trainer.logprobs([_IDS]), local.logprobs([_IDS])
        np.testing.assert_array_equal(ours, theirs)

        await trainer.save(str(tmp_path / "checkpoints" / "step-1"))
        after = await trainer.step(random_batch(version=1, seed=1))
        written = await trainer.finish_save(wait=True)
        assert written is not None
        assert written.directory == str(tmp_path / "checkpoints" / "step-1")
        assert await trainer.finish_save(wait=True) is None  # it was reported
        restored = await trainer.restore(str(tmp_path / "checkpoints" / "step-1"))
        assert (restored.policy_version, restored.steps) == (1, 1)
        again = await trainer.step(random_batch(version=1, seed=1))
        assert again.metrics["loss"] == after.metrics["loss"]

        await _refusals_leave_it_usable(trainer, tmp_path)
        pid = trainer.pid
    assert not _alive(pid)


async def _refusals_leave_it_usable(trainer: RemoteTrainer, tmp_path: Path) -> None:
    with pytest.raises(StaleDataError, match="at most 2 version"):
        await trainer.step(random_batch(version=9, max_staleness=3))
    with pytest.raises(InvariantError, match="the vocabulary has 357"):
        await trainer.logprobs([np.array([1, 500], np.int32)])
    with pytest.raises(TrainError, match="this is not a whole checkpoint"):
        await trainer.restore(str(tmp_path / "nothing"))
    assert (await trainer.step(_poisoned())).skipped == "the loss is nan: not finite"
    with pytest.raises(TrainError, match="2 training steps in a row were not finite"):
        await trainer.step(_poisoned())
    assert (await trainer.step(random_batch())).skipped is None


@_ASYNCIO
async def test_a_full_disk_is_an_error_that_names_the_path_and_leaves_what_was_there(
    tmp_path: Path, checkpoint: Path
) -> None:
    async with _worker(checkpoint, tmp_path) as trainer:
        weights, checkpoints = tmp_path / "weights", tmp_path / "checkpoints"
        await trainer.publish(1, str(weights))
        await _saved(trainer, checkpoints / "step-1")
        resource.prlimit(trainer.pid, resource.RLIMIT_FSIZE, (60_000, resource.RLIM_INFINITY))

        with pytest.raises(TrainError, match=r"cannot write .*v00000002: File too large"):
            await trainer.publish(2, str(weights))
        with pytest.raises(TrainError, match=r"cannot write .*step-2: File too large"):
            await _saved(trainer, checkpoints / "step-2")
        await trainer.save(str(checkpoints / "step-2"))
        with pytest.raises(TrainError, match=r"cannot write .*step-2: File too large"):  # asked for or not
            await trainer.save(str(checkpoints / "step-3"))

        assert [path.name for path in weights.iterdir()] == ["v00000001"]
        assert [path.name for path in checkpoints.iterdir()] == ["step-1"]
        resource.prlimit(trainer.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        await trainer.publish(2, str(weights))


@_ASYNCIO
async def test_leaving_the_block_in_the_middle_of_a_step_ends_a_worker_that_cannot_answer(
    tmp_path: Path, checkpoint: Path
) -> None:
    pid = 0
    async with anyio.create_task_group() as group, _worker(checkpoint, tmp_path) as trainer:
        pid = trainer.pid
        os.kill(pid, signal.SIGSTOP)  # it can neither answer nor end by itself
        group.start_soon(trainer.step, random_batch())
        await anyio.wait_all_tasks_blocked()
        group.cancel_scope.cancel()
    assert pid
    assert not _alive(pid)


async def test_a_killed_worker_is_reported_at_once_and_not_at_the_deadline(tmp_path: Path) -> None:
    errors: list[TrainError] = []

    async def train(trainer: RemoteTrainer) -> None:
        with pytest.raises(TrainError) as caught:
            await trainer.step(random_batch())
        errors.append(caught.value)

    async with _impostor(_SILENT, tmp_path, timeout_s=3600) as trainer:
        with anyio.fail_after(300):
            async with anyio.create_task_group() as group:
                group.start_soon(train, trainer)
                await anyio.wait_all_tasks_blocked()
                os.kill(trainer.pid, signal.SIGKILL)
        with pytest.raises(TrainError, match="cannot be used again: it died while training on 6 samples"):
            await trainer.publish(1, str(tmp_path))
    assert "trainer worker: it died while training on 6 samples; signal SIGKILL" in str(errors[0])


async def test_a_model_that_is_not_there_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected a local Hugging Face model directory"):
        async with _worker(tmp_path / "nothing", tmp_path):
            pass


async def test_a_worker_that_never_answers_is_reported_at_the_deadline(tmp_path: Path) -> None:
    async with _impostor(_SILENT, tmp_path, timeout_s=0.05) as trainer:
        with pytest.raises(TrainError, match=r"the driver waited for the trainer worker .*took more than 0\.05 s"):
            await trainer.save("x")


async def test_a_stopped_worker_ends_at_the_deadline_as_a_killed_one_does(tmp_path: Path) -> None:
    async with _impostor(_SILENT, tmp_path, timeout_s=0.05) as trainer:
        os.kill(trainer.pid, signal.SIGSTOP)
        with pytest.raises(TrainError, match=r"(?s)saving x took more than 0\.05 s .*, so it was killed; signal SIGKILL;"):
            await trainer.save("x")
        assert not trainer.idle
        with pytest.raises(TrainError, match="cannot be used again: saving x took more than"):
            await trainer.publish(1, str(tmp_path))


async def test_a_worker_that_gives_no_sign_of_life_is_named_long_before_the_deadline(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with _named_pipe("first") as first, _named_pipe("second") as second, _acting_on_records(first, second):
        async with _impostor(_BEATS_LATE, tmp_path, silent_s=0.05) as trainer:
            await trainer.save(_LONG_NAME)
    silent, alive, *_ = (record.getMessage() for record in caplog.records)
    assert "has given no sign of life for 0.05 s while saving a long name" in silent
    assert "gives signs of life again" in alive


async def test_a_sign_of_life_that_comes_while_the_driver_is_busy_is_not_missed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkfifo("beaten")
    silent = anyio.Event()
    with _named_pipe("first") as first, _named_pipe("second") as second, _acting_on_records(silent.set, second):
        async with _impostor(_BEATS_LATE, tmp_path, silent_s=0.05) as trainer, anyio.create_task_group() as tasks:
            tasks.start_soon(trainer.save, _LONG_NAME)
            await silent.wait()
            first()
            open("beaten").close()  # noqa: ASYNC230 - blocks the loop until the sign is on its way
            time.sleep(0.1)  # noqa: ASYNC251 - and until the driver waits for it no longer
    assert "gives signs of life again" in caplog.text


async def test_the_last_words_of_a_worker_that_dies_are_in_the_error(tmp_path: Path) -> None:
    async with _impostor(_DIES, tmp_path) as trainer:
        with pytest.raises(TrainError, match=r"(?s)it died while saving .*; exit code 1; .*no more memory"):
            await trainer.save(_LONG_NAME)


async def test_what_is_not_a_frame_is_refused(tmp_path: Path) -> None:
    async with _impostor(_PRINTS, tmp_path) as trainer:
        with pytest.raises(InvariantError, match=r"a frame header announces"):
            await trainer.save(_LONG_NAME)


_CALLS: dict[str, Callable[[RemoteTrainer], Coroutine[Any, Any, object]]] = {
    "training on 6 samples": lambda trainer: trainer.step(random_batch()),
    "publishing version 1": lambda trainer: trainer.publish(1, "x"),
    "computing the log-probs of 1 sequences": lambda trainer: trainer.logprobs([_IDS]),
    "writing the checkpoint": lambda trainer: trainer.finish_save(wait=True),
    "saving x": lambda trainer: trainer.save("x"),
    "restoring x": lambda trainer: trainer.restore("x"),
}


@pytest.mark.parametrize("what", list(_CALLS))
async def test_a_cancelled_call_leaves_a_trainer_that_refuses_instead_of_mixing_up_replies(
    tmp_path: Path, what: str
) -> None:
    async with _impostor(_SILENT, tmp_path) as trainer:
        async with anyio.create_task_group() as group:
            group.start_soon(_CALLS[what], trainer)
            await anyio.wait_all_tasks_blocked()
            group.cancel_scope.cancel()

        with pytest.raises(TrainError, match=f"cannot be used again: {what} got no reply"):
            await trainer.publish(2, str(tmp_path))


async def test_a_launch_that_is_cancelled_leaves_no_process(tmp_path: Path, checkpoint: Path) -> None:
    before = set(children(os.getpid()))

    with anyio.move_on_after(0.05) as scope:
        async with _worker(checkpoint, tmp_path):
            pass

    assert scope.cancelled_caught
    assert set(children(os.getpid())) <= before


async def test_a_call_that_waits_its_turn_can_be_cancelled_without_harm(tmp_path: Path) -> None:
    async with _impostor(_SILENT, tmp_path) as trainer, anyio.create_task_group() as group:
        group.start_soon(trainer.save, "first")
        await anyio.wait_all_tasks_blocked()
        with anyio.move_on_after(0.01) as scope:
            await trainer.restore("second")
        assert scope.cancelled_caught
        group.cancel_scope.cancel()


async def test_a_log_that_cannot_be_written_is_a_config_error(tmp_path: Path, checkpoint: Path) -> None:
    (tmp_path / "logs").write_text("a file")

    with pytest.raises(ConfigError, match=r"cannot write the log .*trainer\.log"):
        async with _worker(checkpoint, tmp_path):
            pass
