"""A writer that is killed: the checkpoint before stays the newest, and the next writer removes what is incomplete."""

from __future__ import annotations

import os
import resource
import signal
from pathlib import Path

import numpy as np
import pytest

from agentrl.trainer.checkpoints.format import TrainerState
from agentrl.trainer.checkpoints.read import latest_checkpoint
from agentrl.trainer.checkpoints.write import CheckpointJob, StagedParts, write_checkpoint
from agentrl.trainer.parallel.ranks import Ranks
from agentrl.weights.tensors import RawTensor, TensorPart
from tests.support.ranks import on_ranks
from tests.support.tiny import tiny_checkpoint
from tests.trainer.helpers import random_batch, save_checkpoint
from tests.trainer.parallel.steps import make_trainer

pytestmark = pytest.mark.starts

ROWS = 60_000
LIMIT = 100_000
"""Bytes of a file at which its writer is killed; the file would be more than twice as long."""


class KilledAtExchange(Ranks):
    """One rank, which kills its process when it exchanges errors for the `last`-th time; 0: never."""

    def __init__(self, last: int) -> None:
        self._left = last

    def first_error(self, error: str | None) -> str | None:
        self._left -= 1
        if self._left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().first_error(error)


def write_numbers(ranks: Ranks, root: Path, steps: int) -> None:
    raw = RawTensor.of(np.full(ROWS, steps, np.float32))
    part = TensorPart(whole=raw.shape, offset=(0,), data=raw)
    state = TrainerState(policy_version=steps, steps=steps, optimizer_steps=steps, bad_steps=0)
    parts = StagedParts(weights={"w": part}, optimizer={"exp_avg.w": part})
    job = CheckpointJob(directory=root / f"step-{steps}", parts=parts, state=state, note="", source=root)
    write_checkpoint(ranks, job)


def die_at_the_limit() -> None:
    """Let the kernel end this process in the write that makes a file longer than `LIMIT`; no handler runs."""
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (LIMIT, LIMIT))


def killed_at_exchange(ranks: Ranks, root: Path, exchange: int) -> None:
    write_numbers(KilledAtExchange(exchange), root, 2)


def killed_in_a_file(ranks: Ranks, root: Path) -> None:
    die_at_the_limit()
    write_numbers(ranks, root, 2)


@pytest.mark.parametrize(
    ("exchange", "files"), [pytest.param(1, [], marks=pytest.mark.long), (2, ["model.safetensors", "optimizer.state"])]
)
def test_a_writer_killed_between_files_leaves_the_checkpoint_before(tmp_path: Path, exchange: int, files: list[str]) -> None:
    write_numbers(Ranks(), tmp_path, 1)

    with pytest.raises(EOFError):  # the process has gone without an answer
        on_ranks(1, killed_at_exchange, tmp_path, exchange)

    assert sorted(path.name for path in (tmp_path / ".writing-step-2").iterdir()) == files
    _check_that_training_continues_from(tmp_path, 1)


def test_a_writer_killed_in_the_middle_of_a_file_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    write_numbers(Ranks(), tmp_path, 1)

    with pytest.raises(EOFError):
        on_ranks(1, killed_in_a_file, tmp_path)

    assert (tmp_path / ".writing-step-2" / "model.safetensors").stat().st_size <= LIMIT
    _check_that_training_continues_from(tmp_path, 1)


@pytest.mark.long
def test_a_writer_killed_after_its_last_file_leaves_the_new_checkpoint(tmp_path: Path) -> None:
    write_numbers(Ranks(), tmp_path, 1)

    with pytest.raises(EOFError):
        on_ranks(1, killed_at_exchange, tmp_path, 3)

    _check_that_training_continues_from(tmp_path, 2)


def second_rank_killed_in_a_file(ranks: Ranks, path: Path, folder: Path) -> None:
    trainer = make_trainer(ranks, path, {"microbatch_tokens": 64})
    save_checkpoint(trainer, folder / "step-1")
    trainer.step(random_batch(version=1))
    if ranks.rank == 1:
        die_at_the_limit()
    save_checkpoint(trainer, folder / "step-2")


@pytest.mark.long
def test_a_rank_killed_in_the_middle_of_its_file_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    path = tiny_checkpoint(tmp_path / "model")

    with pytest.raises(EOFError):
        on_ranks(2, second_rank_killed_in_a_file, path, tmp_path / "saved")

    found = latest_checkpoint(tmp_path / "saved")
    assert found is not None
    assert found.path.name == "step-1"


def _check_that_training_continues_from(root: Path, steps: int) -> None:
    found = latest_checkpoint(root)
    assert found is not None
    assert (found.path.name, found.state.steps) == (f"step-{steps}", steps)
    write_numbers(Ranks(), root, steps + 1)
    assert sorted(path.name for path in root.glob("*step*")) == [f"step-{n}" for n in range(1, steps + 2)]
