"""Which splits a run has had: `splits.json` in its directory, one entry for each start.

Invariant: the file is replaced as a whole. A run without `cluster.split` has none.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from agentrl.cluster.split import Split
from agentrl.config import RunConfig
from agentrl.errors import ConfigError
from agentrl.files import write_json

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
        ConfigError: what is there cannot be read.
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
