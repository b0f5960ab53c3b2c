"""The splits that a run has had (`splits.json` in its directory), and how busy its parts were under the present one.

Invariant: the file is replaced as a whole; it has one entry for each start, and a run without `cluster.split` has none.
Only whole windows of steps under the present split count, and only steps whose metrics say how busy the parts were.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from agentrl.config import RunConfig
from agentrl.errors import ConfigError
from agentrl.observe.runs.reading import read_metrics
from agentrl.plan.splits import Split
from agentrl.support.files import write_json

WINDOW_STEPS = 10
"""Steps of a window in which idle time is measured."""
FULL_DRIVER = 0.9
"""Cores in use at which the driver, whose event loop has one, cannot do more."""
_FILE = "splits.json"


class RecordedSplit(msgspec.Struct, frozen=True, kw_only=True):
    """The split with which a run started or continued."""

    step: int
    """The step after which it began."""
    gpus: int
    """GPUs that there were to divide."""
    train: int
    rollout: int

    @property
    def split(self) -> Split:
        """The division of the GPUs."""
        return Split(train=self.train, rollout=self.rollout)


class _Record(msgspec.Struct, frozen=True):
    splits: list[RecordedSplit]


def record_split(run: RunConfig, step: int) -> None:
    """Add the split with which `run`, whose split is resolved, continues after `step`; do nothing where it has none.

    Raises:
        OSError: the file cannot be written.
    """
    split, gpus = run.cluster.split, run.cluster.gpus
    if split is None or split.train == "auto" or split.rollout == "auto" or gpus == "auto":
        return
    now = RecordedSplit(step=step, gpus=gpus, train=split.train, rollout=split.rollout)
    write_json(run.run_dir / _FILE, msgspec.to_builtins(_Record(splits=[*read_splits(run.run_dir), now])))


def read_splits(run_dir: Path) -> list[RecordedSplit]:
    """Return the splits of a run, the newest last; none where it has no record.

    Raises:
        ConfigError: the file holds something else.
    """
    file = run_dir / _FILE
    try:
        return msgspec.json.decode(file.read_bytes(), type=_Record).splits
    except FileNotFoundError:
        return []
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(
            f"{file}: expected the splits of the run: {error}; remove the file to start from cluster.split"
        ) from error


def first_step_of_split(splits: list[RecordedSplit]) -> int:
    """Return the step after which the newest split began, also where the run has started again with it since.

    Example:
        >>> splits = [RecordedSplit(step=step, gpus=8, train=n, rollout=8 - n) for step, n in ((0, 6), (9, 2), (12, 2))]
        >>> first_step_of_split(splits)
        9
    """
    began = 0
    for before, after in zip([None, *splits], splits, strict=False):
        if before is None or before.split != after.split:
            began = after.step
    return began


def advise_driver(run: RunConfig) -> str | None:
    """Return what to change where the driver was busy all the time in the last two windows; None where it was not."""
    cores = full_driver(steps_of_split(run))
    if cores is None:
        return None
    if run.rollout.runner == "local":
        change = "set rollout.runner: processes and rollout.workers, so that episodes run beside it"
    else:
        change = "its workers' model calls are more than one process can pass on: make fewer and longer ones"
    useless = ", so more or other GPUs do not help" if run.inference.backend == "sglang" else ""
    return f"{cores:.1f} cores busy, and its event loop has one{useless}; {change}"


def steps_of_split(run: RunConfig) -> list[Mapping[str, Any]]:
    """Return the steps under the present split that say how busy the parts were; older lines do not."""
    if not (run.run_dir / "metrics.jsonl").is_file():
        return []
    began = first_step_of_split(read_splits(run.run_dir))
    steps = (line for line in read_metrics(run.run_dir) if line["event"] == "step" and line["step"] > began)
    return [line for line in steps if {"trainer_busy_share", "driver_busy_cores"} <= line.keys()]


def full_driver(steps: Sequence[Mapping[str, Any]]) -> float | None:
    """Return the cores that the driver used in the last two windows, if it was full in both."""
    used = [mean_of(window, "driver_busy_cores") for window in windows_of(steps)[-2:]]
    return sum(used) / 2 if len(used) == 2 and min(used) >= FULL_DRIVER else None


def windows_of(steps: Sequence[Mapping[str, Any]]) -> list[Sequence[Mapping[str, Any]]]:
    """Return the whole windows of steps, the newest last."""
    first = len(steps) % WINDOW_STEPS
    return [steps[at : at + WINDOW_STEPS] for at in range(first, len(steps), WINDOW_STEPS)]


def mean_of(window: Sequence[Mapping[str, Any]], key: str) -> float:
    """Return the mean of a figure over the steps of a window."""
    return sum(line[key] for line in window) / len(window)
