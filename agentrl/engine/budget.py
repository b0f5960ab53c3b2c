"""When failing episodes stop a run.

Invariant: a workflow that always fails stops the run after `max_consecutive_failures` episodes, one that fails often enough
that no group is ever whole after as many groups; the message holds the first traceback.
"""

from __future__ import annotations

from collections import Counter, deque

from agentrl.errors import ErrorBudgetExceeded
from agentrl.rollout.config import RolloutConfig
from agentrl.types import EpisodeFailure, Trajectory


class ErrorBudget:
    """Counts failed attempts of training episodes, and the groups they cost."""

    WINDOW = 64
    """Episodes the failure rate is taken over; it counts once there are that many."""

    def __init__(self, rollout: RolloutConfig) -> None:
        """Allow what `rollout` allows."""
        self._rollout = rollout
        self._recent: deque[bool] = deque(maxlen=self.WINDOW)
        self._in_a_row = 0
        self._groups_in_a_row = 0
        self._first: EpisodeFailure | None = None
        self.by_reason: Counter[str] = Counter()
        """Failed attempts so far, by stop reason."""

    def record(self, episode: Trajectory) -> None:
        """Count one finished attempt.

        Raises:
            ErrorBudgetExceeded: when too many have failed; the message carries the first failure's traceback.
        """
        failure = episode.failure
        self._recent.append(failure is not None)
        if failure is None:
            self._in_a_row = 0
            return
        self._first = self._first or failure
        self._in_a_row += 1
        self.by_reason[str(episode.stop_reason)] += 1
        if self._in_a_row >= self._rollout.max_consecutive_failures:
            self._stop(f"{self._in_a_row} episodes in a row failed (max_consecutive_failures)")
        rate = sum(self._recent) / self.WINDOW
        if len(self._recent) == self.WINDOW and rate > self._rollout.max_failure_rate:
            limit = self._rollout.max_failure_rate
            self._stop(f"{rate:.0%} of the last {self.WINDOW} episodes failed (max_failure_rate {limit:.0%})")

    def group_completed(self) -> None:
        """Note that a group is whole, so that the trainer gets something."""
        self._groups_in_a_row = 0

    def group_dropped(self, reason: str) -> None:
        """Count a group that was dropped for its failed members.

        Raises:
            ErrorBudgetExceeded: when too many were in a row: the trainer would wait for ever while episodes go on.
        """
        self._groups_in_a_row += 1
        if self._groups_in_a_row >= self._rollout.max_consecutive_failures:
            self._stop(
                f"{self._groups_in_a_row} groups in a row were dropped, the last as {reason} (max_consecutive_failures): "
                "there is nothing to train on; set rollout.incomplete_group: keep, or raise rollout.episode_retries"
            )

    def _stop(self, why: str) -> None:
        reasons = ", ".join(f"{count} {reason}" for reason, count in self.by_reason.most_common())
        hint = ""
        if any(reason in self.by_reason for reason in ("turn_limit", "token_limit")):
            hint = " Set the workflow's limit_reward if running out of turns or tokens is an outcome, not a failure."
        first = self._first
        told = "" if first is None else f" The first one was {first.kind}: {first.message}\n{first.traceback}"
        raise ErrorBudgetExceeded(f"{why}. All failures: {reasons}.{hint}{told}".rstrip())
