"""The failures that a run bears before it ends, and the lines that raise right after a turn of the policy.

Invariant: a workflow that always fails stops the run after `max_consecutive_failures` episodes, or as many dropped groups.
The error carries the first traceback. Each line is warned about once.
"""

from __future__ import annotations

import logging
from collections import Counter, deque

from agentrl.errors import ErrorBudgetExceeded, RolloutWorkerDied
from agentrl.rollout.config import RolloutConfig
from agentrl.types import EpisodeFailure, Trajectory

logger = logging.getLogger(__name__)


class ErrorBudget:
    """Counts failed attempts of training episodes and the groups dropped for them."""

    WINDOW = 64
    """Number of recent episodes in the failure rate, which is checked once there are that many."""

    def __init__(self, rollout: RolloutConfig) -> None:
        self._rollout = rollout
        self._recent: deque[bool] = deque(maxlen=self.WINDOW)
        self._in_a_row = 0
        self._groups_in_a_row = 0
        self._first: EpisodeFailure | None = None
        self.by_reason: Counter[str] = Counter()

    def record(self, episode: Trajectory) -> None:
        failure = episode.failure
        if failure is not None and failure.kind == RolloutWorkerDied.__name__:
            # One death fails many episodes and says little about each; the workers' own limit ends the run.
            self.by_reason[str(episode.stop_reason)] += 1
            return
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
        self._groups_in_a_row = 0

    def group_dropped(self, reason: str) -> None:
        self._groups_in_a_row += 1
        if self._groups_in_a_row >= self._rollout.max_consecutive_failures:
            self._stop(
                f"{self._groups_in_a_row} groups in a row were dropped, the last as {reason} (max_consecutive_failures): "
                "there is nothing to train on; set rollout.incomplete_group: keep, or raise rollout.episode_retries"
            )

    def _stop(self, why: str) -> None:
        reasons = ", ".join(f"{count} {reason}" for reason, count in self.by_reason.most_common())
        first = self._first
        example = "" if first is None else f" The first one was {first.kind}: {first.message}\n{first.traceback}"
        raise ErrorBudgetExceeded(f"{why}. All failures: {reasons}.{example}".rstrip())


class AfterTurnErrors:
    """Counts, by line, the training episodes in which a workflow raised right after a turn.

    An episode that fails has no reward, so where the model's output makes a workflow raise, the policy is never told.
    """

    WINDOW = 64
    """Number of recent episodes that a line's share is of."""
    SHARE = 0.05
    """A line with more of the window than this is warned about."""

    def __init__(self) -> None:
        self.by_line: Counter[str] = Counter()
        self._recent: deque[str | None] = deque(maxlen=self.WINDOW)
        self._warned: set[str] = set()

    def record(self, episode: Trajectory) -> None:
        line = None if episode.failure is None else episode.failure.after_turn
        self._recent.append(line)
        if episode.failure is None or line is None:
            return
        self.by_line[line] += 1
        count = self._recent.count(line)
        if line not in self._warned and count > self.SHARE * self.WINDOW:
            self._warned.add(line)
            logger.warning(
                "%s raised right after a model turn in %d of the last %d episodes (the last one: %s). A failed episode has "
                "no reward, so the policy never learns to avoid it. Where the model's output is the cause, return a "
                "reward instead (docs/howto/agent.md); where a backend is, raise agentrl.EnvironmentFault",
                line,
                count,
                len(self._recent),
                episode.failure.message,
            )
