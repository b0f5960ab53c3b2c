"""Steps and groups that teach nothing, and episodes that fail: why, what to change, and when the run gives up.

Invariant: a step that leaves the weights as they were is explained to a person, and a run that trains nothing for
`engine.stop_after_skipped` steps in a row ends with an error. So does one whose workflow fails `max_consecutive_failures`
times in a row, with the first traceback. Each line that raises right after a turn of the policy is warned about once.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Sequence
from typing import Final

import numpy as np

from agentrl.algo.config import AlgorithmConfig
from agentrl.algo.group_slots import returns_differ
from agentrl.engine.config import EngineConfig
from agentrl.episode.summary import is_success
from agentrl.errors import ErrorBudgetExceeded, NothingLearned, RolloutWorkerDied
from agentrl.rollout.config import RolloutConfig
from agentrl.types import EpisodeFailure, Group, Trajectory

logger = logging.getLogger(__name__)

SOLVED: Final = 0.9
"""Share of a batch's episodes that succeed, from which a batch without a signal is no reason to warn."""
WINDOW: Final = 16
"""Groups in a row that must have equal scores before a warning."""
TURN_REWARDS_ADVICE: Final = (
    "algorithm.advantage: episode gives each turn the whole episode's return; algorithm.advantage: turn credits it with the "
    "rewards that were set after it was sent"
)
"""Advice for turns whose rewards the run does not use for what they are."""


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


class SkippedSteps:
    """Watches the batches of a run for a learning signal."""

    def __init__(self, algorithm: AlgorithmConfig, config: EngineConfig) -> None:
        self._algorithm, self._limit = algorithm, config.stop_after_skipped
        self._in_a_row = 0
        self._last_reason = ""
        self._saw_turn_rewards = False

    def step(self, number: int, groups: Sequence[Group], skipped: str | None) -> None:
        """Count a step, with the reason why it was skipped; raises NothingLearned when too many in a row were."""
        self._warn_of_turn_rewards(groups)
        if skipped is None:
            self._in_a_row, self._last_reason = 0, ""
            return
        self._in_a_row += 1
        why = explain_skip(skipped, groups, self._algorithm)
        if why != self._last_reason:
            self._tell(number, groups, why)
        self._last_reason = why
        if self._limit and self._in_a_row >= self._limit:
            raise NothingLearned(
                f"step {number}: the last {self._in_a_row} steps trained nothing (engine.stop_after_skipped): {why}"
            )

    def _tell(self, number: int, groups: Sequence[Group], why: str) -> None:
        outcomes = [is_success(episode) for group in groups for episode in group.episodes]
        if sum(outcomes) < SOLVED * len(outcomes):
            logger.warning("step %d trained nothing: %s", number, why)
            return
        logger.info(
            "step %d had nothing to learn from: %d of %d episodes succeeded, and in no group did they differ",
            number,
            sum(outcomes),
            len(outcomes),
        )

    def _warn_of_turn_rewards(self, groups: Sequence[Group]) -> None:
        if self._saw_turn_rewards or self._algorithm.advantage_name != "episode":
            return
        for episode in (episode for group in groups for episode in group.episodes):
            if _has_turn_rewards(episode) and episode.advantage is None:
                self._saw_turn_rewards = True
                logger.warning("episode %s has rewards of single turns, but %s", episode.episode_id, TURN_REWARDS_ADVICE)
                return


def explain_skip(skipped: str, groups: Sequence[Group], algorithm: AlgorithmConfig) -> str:
    """Return the reason of a skipped step and the remedy, for `skipped` as `StepReport` and `PreparedBatch` give it."""
    if skipped == "zero_variance":
        if different := sum(map(returns_differ, groups)):
            return (
                f"the advantages of {len(groups)} of {len(groups)} groups are all 0, although the episodes of {different} "
                f"differ in their return, which algorithm.advantage: {algorithm.advantage_name} does not tell apart; give "
                "it other options, such as a smaller k, or choose another advantage"
            )
        return f"{len(groups)} of {len(groups)} groups have equal returns; {_equal_returns(groups, algorithm)}"
    if skipped == "no_tokens":
        return (
            "its batch holds no token that can be trained: every call was greedy (sampling.temperature: 0), empty, left "
            "out as a side call, or over algorithm.max_staleness"
        )
    return f"{skipped}; if this repeats, lower trainer.lr or look at the rewards of the batch in metrics.jsonl"


def _equal_returns(groups: Sequence[Group], algorithm: AlgorithmConfig) -> str:
    episodes = [episode for group in groups for episode in group.episodes]
    if all(episode.advantage is not None for episode in episodes):
        return "score_group gave each of their members the advantage 0: look at its scores, or use harder or easier tasks"
    returns = np.array([episode.episode_return for episode in episodes])
    if algorithm.advantage_name == "episode" and any(_has_turn_rewards(episode) for episode in episodes):
        total = f"{returns[0]:g}" if np.ptp(returns) < 1e-9 else "the same number"
        return f"turn rewards sum to {total} within each episode: try algorithm.advantage: turn"
    if np.ptp(returns) > 1e-9:
        return "tasks differ, but the episodes of one task do not: raise algorithm.group_size or sampling.temperature"
    if returns[0] > 0:
        return f"every return is {returns[0]:g}: the tasks are solved; use harder ones, or end the run"
    return (
        f"every return is {returns[0]:g}: look at an episode (does the reward recognize a right answer?), use easier tasks, "
        "give partial rewards, or start from a model that sometimes succeeds"
    )


def _has_turn_rewards(episode: Trajectory) -> bool:
    return any(turn.reward for turn in episode.turns)


class EqualScores:
    """Watches the groups that `score_group` scored, and warns once where all members get one and the same score."""

    def __init__(self) -> None:
        self._in_a_row = 0
        self._has_warned = False

    def see(self, scored: Sequence[Trajectory]) -> None:
        """Count a group as `score_group` left it; failed members, given advantages and turns with rewards do not count."""
        if len(scored) < 2 or any(each.failure is not None or each.advantage is not None for each in scored):
            return
        if any(turn.reward is not None for each in scored for turn in each.turns):
            return
        equal = len({each.final_reward for each in scored}) == 1
        self._in_a_row = self._in_a_row + 1 if equal else 0
        if self._in_a_row == WINDOW and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "score_group gave all members of a group one and the same score, in %d groups in a row. A member is "
                "compared with the others, so these groups teach nothing. Score each member by what it adds to the "
                "group, or return MemberAdvantages, such as agentrl_rewards.pass_at_k.pass_at_k(scores); if the tasks are "
                "all solved, or none is, use others",
                WINDOW,
            )
