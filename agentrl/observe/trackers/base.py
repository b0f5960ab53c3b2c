"""The interface of a tracker.

Invariant: one thread at a time calls a tracker, in the order of the run: `start` first, `finish` last.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol, TypeAlias, runtime_checkable

from agentrl.episode.summary import Purpose
from agentrl.observe.timeline import Activity
from agentrl.types import JsonValue, Trajectory

Choice: TypeAlias = Literal["best", "worst", "random"]
RunStatus: TypeAlias = Literal["finished", "failed", "interrupted"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackedRun:
    """The facts about a run that its trackers get when it starts."""

    name: str
    run_dir: Path
    """A tracker keeps its own files below it."""
    project: str
    """Groups runs in the tools that have projects or experiments."""
    config: Mapping[str, JsonValue]
    """The resolved run file."""
    resumed_step: int
    """Steps that an earlier process finished; 0: a new run. A tracker continues what that process began."""
    began_at: float
    """Unix time, seconds, at which the run's clock showed 0, if the run had not paused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledEpisode:
    """An episode to read."""

    choice: Choice
    """Why it was chosen among the episodes of its step."""
    episode_id: str
    task_id: str
    episode_return: float
    success: bool
    text: str
    """The conversation as the model saw it, with the reward of each turn; its middle is left out where it is long."""


@runtime_checkable
class Tracker(Protocol):
    """Receives the records of a run; a subclass overrides the methods that it needs.

    Methods run in a thread, so they may block. The first one that raises is reported, and the run continues without
    the tracker.
    """

    def start(self, run: TrackedRun) -> None:
        """Open whatever the tracker writes to."""

    def step(self, step: int, wall_s: float, numbers: Mapping[str, float]) -> None:
        """Take the numbers of a finished training step.

        Args:
            step: number of the step, from 1.
            wall_s: seconds on the run's clock.
            numbers: the numbers of its line in `metrics.jsonl`, such as `success_rate` and `trainer.loss`.
        """

    def evaluation(self, step: int, wall_s: float, numbers: Mapping[str, float]) -> None:
        """Take the numbers of an evaluation that was asked for after `step`; arguments as in `step`."""

    def episodes(self, step: int, purpose: Purpose, samples: Sequence[SampledEpisode]) -> None:
        """Take some episodes of a training step, or of the evaluation after it."""

    def activity(self, activity: Activity) -> None:
        """Take an activity of `timeline.jsonl` that has ended."""

    def episode(self, step: int, purpose: Purpose, episode: Trajectory) -> None:
        """Take an episode that has ended, failed attempts included; its times are moments of `time.perf_counter`."""

    def finish(self, status: RunStatus) -> None:
        """Close what `start` opened."""
