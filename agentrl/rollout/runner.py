"""The runners of the policy's episodes: this process (`episode.LocalRunner`) or workers (`remote.RemoteRunner`).

Invariant: the caller of a runner sees no difference.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from agentrl.client.config import SamplingConfig
from agentrl.inference.backend import Backend
from agentrl.types import Task, Trajectory, Turn


class PolicyRunner(Protocol):
    """Runs episodes of one workflow with the policy."""

    def opened(self, backend: Backend) -> AbstractAsyncContextManager[None]:
        """Hold open what episodes need while the block runs; `backend` answers their model calls."""
        ...

    async def play(
        self, task: Task, *, episode_id: str, sampling: SamplingConfig, on_turn: Callable[[Turn], None]
    ) -> Trajectory:
        """Return the trajectory of one episode, inside `opened`; a failed one has `failure` set."""
        ...

    async def score(self, task: Task, episodes: tuple[Trajectory, ...]) -> tuple[Trajectory, ...]:
        """Return the episodes of a group of a `GroupWorkflow` with their scores, or all as failures, as `score_episodes`."""
        ...
