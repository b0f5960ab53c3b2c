"""The turns and the sampled tokens that one episode may take.

Invariant: a budget is checked before the call that it forbids; a running call counts as a turn until it ends.
"""

from __future__ import annotations

from typing import Self

from agentrl.errors import EpisodeLimit
from agentrl.types import StopReason


class RunningCall:
    """One call that runs, a context manager. It ends once: when it is closed, or when its last reference goes."""

    __slots__ = ("_budget",)

    def __init__(self, budget: EpisodeBudget) -> None:
        """Count the call."""
        budget.in_flight += 1
        self._budget: EpisodeBudget | None = budget

    def close(self) -> None:
        """End the call; a second time does nothing."""
        if self._budget is not None:
            self._budget.in_flight -= 1
            self._budget = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *details: object) -> None:
        self.close()

    __del__ = close


class EpisodeBudget:
    """The budgets of one episode. Single-threaded: no method awaits."""

    def __init__(self, episode_id: str, *, max_turns: int | None, max_tokens: int | None) -> None:
        """Start with nothing spent; None means no limit."""
        self.max_tokens = max_tokens
        """Sampled tokens of all calls."""
        self.limit_reached: StopReason | None = None
        """The first budget that a call was refused for."""
        self.in_flight = 0
        """Running calls."""
        self._episode_id = episode_id
        self._max_turns = max_turns
        self._turns = 0
        self._tokens = 0

    def start_call(self) -> RunningCall:
        """Count one more running call.

        Raises:
            EpisodeLimit: the tokens are spent, or the turns, of which each running call takes one.
        """
        if self.max_tokens is not None and self._tokens >= self.max_tokens:
            spent = f"{self._tokens} of {self.max_tokens} sampled tokens are spent"
            raise self.exceeded(StopReason.TOKEN_LIMIT, spent)
        taken = self._turns + self.in_flight
        if self._max_turns is not None and taken >= self._max_turns:
            running = f", {self.in_flight} of them running (close a stream that is left early)" if self.in_flight else ""
            raise self.exceeded(StopReason.TURN_LIMIT, f"{taken} of {self._max_turns} turns are spent{running}")
        return RunningCall(self)

    def exceeded(self, reason: StopReason, what: str) -> EpisodeLimit:
        """Return the error for a spent budget, and remember the reason if it is the first."""
        self.limit_reached = self.limit_reached or reason
        return EpisodeLimit(f"episode {self._episode_id}: {what}")

    def clip(self, max_tokens: int) -> int:
        """Return the output limit of a call, lowered to the tokens that are left."""
        return max_tokens if self.max_tokens is None else min(max_tokens, self.max_tokens - self._tokens)

    def add_turn(self, num_tokens: int) -> None:
        """Count a completed call and the tokens it sampled."""
        self._turns += 1
        self._tokens += num_tokens
