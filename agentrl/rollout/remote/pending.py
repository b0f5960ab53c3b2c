"""What the driver waits for in a rollout worker: the end of an episode, or of the scoring of a group.

Invariant: each ends once: with what the worker sends, or as failures where the worker dies first or cannot get it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Generic, TypeVar

import anyio

from agentrl.errors import AgentRLError, InvariantError
from agentrl.rollout.failure import failure_stop_reason
from agentrl.types import EpisodeFailure, Task, Trajectory, Turn

Outcome = TypeVar("Outcome")


class Pending(Generic[Outcome]):
    """What the driver waits for: the end of an episode, or of the scoring of a group."""

    def __init__(self, failed: Callable[[AgentRLError], Outcome]) -> None:
        """Wait; `failed` returns the outcome where the worker dies first, or cannot get it."""
        self.failed = failed
        self._ended = anyio.Event()
        self._outcome: Outcome | AgentRLError | None = None

    @property
    def is_over(self) -> bool:
        """Whether it has ended."""
        return self._ended.is_set()

    def end(self, outcome: Outcome | AgentRLError | None) -> None:
        """Let `wait` return or raise `outcome`; None where the worker cancelled it."""
        self._outcome = outcome
        self._ended.set()

    async def wait(self) -> None:
        """Return at the end.

        Cancellation: passes through.
        """
        await self._ended.wait()

    def result(self) -> Outcome:
        """Return the outcome.

        Raises:
            AgentRLError: the worker reported it.
            InvariantError: the worker cancelled it, which the driver has not asked for.
        """
        if isinstance(self._outcome, AgentRLError):
            raise self._outcome
        if self._outcome is None:
            raise InvariantError("a rollout worker cancelled an episode, or the scoring of a group, by itself")
        return self._outcome


class RemoteFlight(Pending[Trajectory]):
    """An episode in flight in a worker."""

    def __init__(self, task: Task, episode_id: str, on_turn: Callable[[Turn], None]) -> None:
        """Start now."""
        super().__init__(self._failed)
        self.task, self.on_turn = task, on_turn
        self.turns: list[Turn] = []
        """Recorded so far."""
        self._episode_id, self._started_s = episode_id, time.perf_counter()

    def _failed(self, error: AgentRLError) -> Trajectory:
        return Trajectory(
            episode_id=self._episode_id,
            task_id=self.task.id,
            turns=tuple(self.turns),
            stop_reason=failure_stop_reason(error),
            failure=_failure_of(error),
            task=self.task,
            started_s=self._started_s,
            ended_s=time.perf_counter(),
        )


class RemoteScoring(Pending[tuple[Trajectory, ...]]):
    """The scoring of a group in a worker."""

    def __init__(self, episodes: tuple[Trajectory, ...]) -> None:
        """Start with the episodes that are scored."""
        super().__init__(self._failed)
        self.episodes = episodes

    def _failed(self, error: AgentRLError) -> tuple[Trajectory, ...]:
        reason, failure = failure_stop_reason(error), _failure_of(error)
        return tuple(replace(each, stop_reason=reason, final_reward=None, failure=failure) for each in self.episodes)


def _failure_of(error: AgentRLError) -> EpisodeFailure:
    return EpisodeFailure(kind=type(error).__name__, message=str(error), traceback="")
