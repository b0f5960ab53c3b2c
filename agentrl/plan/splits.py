"""Splits of GPUs between training and serving: their types, and the seam to what chooses them for `cluster.split`.

Invariant: what chooses splits is imported only for a run whose file has `cluster.split`, or for advice about its GPUs.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple, Protocol, cast

from agentrl.config import RunConfig
from agentrl.plan.memory import gpus_per_server
from agentrl.plan.model import ModelFacts
from agentrl.support.companions import load_companion

DEFAULT_GPU: Final = "h100"
"""The GPU whose data sheet counts where this machine's is unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """A division of GPUs.

    Example:
        >>> str(Split(train=2, rollout=6))
        '2 GPUs train, 6 serve'
    """

    train: int
    rollout: int

    @property
    def total(self) -> int:
        return self.train + self.rollout

    def __str__(self) -> str:
        return f"{self.train} GPU{'s' if self.train > 1 else ''} train, {self.rollout} serve"


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedSplit:
    """A split with the seconds of the formula: to sample the tokens of a batch, and to train it and publish weights."""

    split: Split
    rollout_s: float
    train_s: float

    @property
    def slower_s(self) -> float:
        """The larger of both, which bounds a step where rollouts and training overlap."""
        return max(self.rollout_s, self.train_s)

    @property
    def order(self) -> tuple[float, float, int]:
        return self.slower_s, self.rollout_s + self.train_s, self.split.train


class ResolvedRun(NamedTuple):
    """A run with numbers in place of each `auto` of its split and of its mesh."""

    run: RunConfig
    splits: tuple[TimedSplit, ...] = ()
    """The feasible splits, the shortest step first; none without `cluster.split` or where the model's shape is unknown."""


class SplitPlanner(Protocol):
    """What `cluster.split` needs: data sheets of GPUs, and a formula for the time of a step."""

    def local_gpu(self, root: Path) -> str | None:
        """Return the name of this machine's GPU in the data sheets, by the files under `root`; None: unknown."""
        ...

    def resolve_run(self, run: RunConfig, model: ModelFacts, root: Path, *, resumes: bool) -> ResolvedRun:
        """Return a run of `cluster.split` with numbers in place of each `auto`; raises `ConfigError`."""
        ...

    def advise_move(self, run: RunConfig, model: ModelFacts) -> str | None:
        """Return the better split that a run's own idle time asks for; None: there is none."""
        ...


def split_planner() -> SplitPlanner:
    """Import and return what chooses splits."""
    return cast("SplitPlanner", load_companion("agentrl.splits", "formula"))


def split_of(run: RunConfig) -> Split:
    """Return the GPUs that a resolved run gives to each side."""
    return Split(train=run.trainer.parallel.shape.world, rollout=run.inference.servers * gpus_per_server(run.inference))
