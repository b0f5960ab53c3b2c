"""The seam for groups that no task of the run opens, such as the conversations of the users of an online run.

Invariant: a source owns each group from its ticket until it completes or drops it. The buffer keeps the staleness bound of
such groups by dropping or masking, since nobody outside waits for the trainer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from agentrl.engine.buffer import GroupBuffer, VersionClock
from agentrl.inference.backend import Backend
from agentrl.types import Group, Trajectory, Turn


class EpisodeLister(Protocol):
    """Lists an episode among those in flight while the block runs; see `InFlight.episode`."""

    def __call__(
        self, episode_id: str, task_id: str, group: int | None
    ) -> AbstractContextManager[Callable[[Turn], None], bool | None]:
        """Yield the callback for the turns of the episode."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupIntake:
    """The parts of a run that a source of groups works with."""

    buffer: GroupBuffer
    clock: VersionClock
    backend: Backend
    """Answers model calls, and counts them by episode."""
    release: Callable[[str], None]
    """Drops what the servers keep of an ended episode."""
    flight: EpisodeLister
    on_episode: Callable[[Trajectory, int], None]
    """Records a finished episode of a group."""
    resumed_step: int
    """Steps of the checkpoint from which the run continues; 0 for a new run."""


class GroupSource(Protocol):
    """Brings groups into the buffer of a run."""

    async def fill(self, intake: GroupIntake) -> None:
        """Open groups, and complete or drop each, until the buffer is closed.

        Cancellation: episodes in flight end and are lost; what the source has promised to keep is on the disk.
        """
        ...

    def is_idle(self) -> bool:
        """Return whether nothing can move before somebody outside acts, so that standing still is no stall."""
        ...

    def dropped(self, index: int) -> None:
        """Take note that the buffer dropped a group."""
        ...

    async def taken(self, step: int, groups: Sequence[Group]) -> Sequence[Group]:
        """Take note that `step` trains these groups, and return their episodes in the groups that are compared."""
        ...
