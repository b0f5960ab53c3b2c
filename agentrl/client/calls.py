"""The model calls of one episode: what they may take, which of them run, and which failed.

Invariant: a budget is checked before the call that it forbids; a running call counts as a turn until it ends. A failed call
stays unresolved until a call that started after the failure completes.
"""

from __future__ import annotations

import math
from typing import Final, Self

from agentrl.concurrency import loop_time
from agentrl.errors import AgentRLError, EpisodeLimit
from agentrl.types import StopReason

BUSY_SHARE: Final = 0.5
"""Share of an episode's deadline; calls of less time in all are not the reason why the episode missed it."""
LONG_CALL_SHARE: Final = 0.1
"""Share of an episode's deadline; a longer call means slow servers, a longer wait for the next call a slow workflow."""


class RunningCall:
    """One call that runs, a context manager. It ends once: when it is closed, or when its last reference goes."""

    __slots__ = ("_began", "_calls", "_failures_before", "_open")

    def __init__(self, calls: EpisodeCalls) -> None:
        """Count the call."""
        self._calls = calls
        self._failures_before = calls.num_failures
        self._began = calls.begin_call()
        self._open = True

    def complete(self) -> None:
        """Resolve the failures before this call: its turn is recorded."""
        self._calls.resolve(self._failures_before)

    def close(self) -> None:
        """End the call; a second time does nothing."""
        if self._open:
            self._open = False
            self._calls.end_call(self._began)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self.close()
        if isinstance(error, AgentRLError):
            self._calls.fail(error)

    __del__ = close


class EpisodeCalls:
    """The calls of one episode. Single-threaded: no method awaits."""

    def __init__(self, episode_id: str, *, max_turns: int | None, max_tokens: int | None) -> None:
        """Start with nothing spent; None means no limit."""
        self.max_tokens = max_tokens
        """Sampled tokens of all calls."""
        self.in_flight = 0
        """Running calls."""
        self._episode_id = episode_id
        self._max_turns = max_turns
        self._turns = 0
        self._tokens = 0
        self._failures: list[AgentRLError] = []
        self._resolved = 0
        self._limit: StopReason | None = None
        self._longest_s = 0.0
        self._busy_s = 0.0
        self._busy_since = -math.inf
        self._last_end = -math.inf

    @property
    def num_failures(self) -> int:
        """Calls that failed or were refused so far."""
        return len(self._failures)

    @property
    def unresolved(self) -> AgentRLError | None:
        """The last failure, unless a call that started after it has completed."""
        return self._failures[-1] if len(self._failures) > self._resolved else None

    @property
    def limit_reached(self) -> StopReason | None:
        """The limit that the unresolved failure is about; None if there is none, or it is about something else."""
        return self._limit if isinstance(self.unresolved, EpisodeLimit) else None

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

    def begin_call(self) -> float:
        """Count one more running call, and return when it began, a moment of `anyio.current_time`."""
        now = loop_time()
        if not self.in_flight:
            self._busy_since = now
        self.in_flight += 1
        return now

    def end_call(self, began: float) -> None:
        """Count one running call less, which began at the moment `began`."""
        now = self._last_end = loop_time()
        self._longest_s = max(self._longest_s, now - began)
        self.in_flight -= 1
        if not self.in_flight:
            self._busy_s += max(0.0, now - self._busy_since)

    def filled_time(self, deadline: float, timeout_s: float) -> bool:
        """Return whether the calls are the reason why the episode had not ended at a past `deadline`, after `timeout_s`.

        That is so where they took at least half of the time, none of them over a tenth, and the last of them ended, or was
        cut off, in the last tenth. Calls at the same time take their time once.
        """
        long_s = LONG_CALL_SHARE * timeout_s
        is_quick = not self.in_flight and self._longest_s <= long_s
        return is_quick and self._busy_s >= BUSY_SHARE * timeout_s and self._last_end >= deadline - long_s

    def exceeded(self, reason: StopReason, what: str) -> EpisodeLimit:
        """Return the error for a limit that a call has reached, and record it as that call's failure."""
        self._limit = reason
        error = EpisodeLimit(f"episode {self._episode_id}: {what}")
        self.fail(error)
        return error

    def fail(self, error: AgentRLError) -> None:
        """Record a failed or refused call; one that is recorded already counts once."""
        if not self._failures or self._failures[-1] is not error:
            self._failures.append(error)

    def resolve(self, count: int) -> None:
        """Count the first `count` failures as resolved."""
        self._resolved = max(self._resolved, count)

    def clip(self, max_tokens: int) -> int:
        """Return the output limit of a call, lowered to the tokens that are left."""
        return max_tokens if self.max_tokens is None else min(max_tokens, self.max_tokens - self._tokens)

    def add_turn(self, num_tokens: int) -> None:
        """Count a completed call and the tokens it sampled."""
        self._turns += 1
        self._tokens += num_tokens
