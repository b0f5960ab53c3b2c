"""What the clients of an episode have in common, whoever samples: rewards, metrics, closing.

Invariant: one episode, one trajectory: `close` returns it once, and nothing can be added to it afterwards.
"""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Protocol, overload

import anyio.lowlevel
from openai import AsyncOpenAI

from agentrl.client.ledger import Ledger
from agentrl.types import EpisodeFailure, StopReason, Trajectory


class EpisodeRecord(Protocol):
    """The part of an episode that `EpisodeClient` needs."""

    @property
    def ledger(self) -> Ledger:
        """Budgets, rewards and metrics."""
        ...

    def reward(self, target: object, value: object) -> None:
        """Set a turn's reward."""
        ...

    def close(self, stop_reason: StopReason, final_reward: float | None, failure: EpisodeFailure | None) -> Trajectory:
        """End the episode."""
        ...


class EpisodeClient(AsyncOpenAI):
    """An `AsyncOpenAI` bound to one episode: `Client` in training, `EndpointClient` in evaluation."""

    _record: EpisodeRecord

    @property
    def limit_reached(self) -> StopReason | None:
        """TURN_LIMIT or TOKEN_LIMIT once a call has been refused for it, even if the workflow caught the error."""
        return self._record.ledger.limit

    def reward(self, completion: object, value: float) -> None:
        """Set the reward of one turn, once.

        Args:
            completion: what the call returned (`ChatCompletion`, `Generation`), a chunk of a finished stream, or the
                completion's id.
            value: a finite number; bool counts as 0 or 1.

        Raises:
            RewardError: `value` is not a finite number, or the turn already has a reward.
            WorkflowError: `completion` is not of this episode, or the episode is closed.
        """
        self._record.reward(completion, value)

    def record(self, **metrics: float) -> None:
        """Record numbers about the episode, such as `busy=1`; the last value of a name counts.

        Raises:
            WorkflowError: a value is not a finite number, or the episode is closed.
        """
        self._record.ledger.record(metrics)

    @overload
    def close(self) -> Awaitable[None]: ...

    @overload
    def close(
        self, stop_reason: StopReason, final_reward: float | None = None, failure: EpisodeFailure | None = None
    ) -> Trajectory: ...

    def close(  # pyright: ignore[reportIncompatibleMethodOverride] - the base ends connections, of which an episode has none
        self, stop_reason: StopReason | None = None, final_reward: float | None = None, failure: EpisodeFailure | None = None
    ) -> Trajectory | Awaitable[None]:
        """End the episode and return its trajectory; later calls on this client raise `WorkflowError`.

        Without arguments it is `AsyncOpenAI.close`, for agents that close what they were given: it does nothing.

        Args:
            stop_reason: why the episode ended.
            final_reward: credited to the whole episode.
            failure: why there is no usable result.

        Raises:
            RewardError: `final_reward` is not a finite number; the episode stays open.
            WorkflowError: the episode is closed already.
        """
        if stop_reason is None:
            return anyio.lowlevel.checkpoint()
        return self._record.close(stop_reason, final_reward, failure)

    async def __aexit__(self, *details: object) -> None:
        """Leave the episode open: whoever made the client closes it."""
