"""Run one group: the episodes of one task, with a rule for members that fail, and their score where they are compared.

Invariant: a group has only episodes that ended without failure, each run from the start. A group without enough of them is
a `DroppedGroup` with a reason. A failed member never counts as a reward of 0. Where a workflow
scores its episodes together, each gets its score as final reward, or an advantage, or all become failures with one reason.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Protocol, TypeAlias

import anyio
from anyio.abc import TaskGroup

from agentrl.env import watch_faults, watch_metrics
from agentrl.episode.checks import check_reward
from agentrl.errors import AgentRLError, WorkflowError
from agentrl.rollout.config import LEAST_KEPT, RolloutConfig
from agentrl.rollout.failure import RUN_ENDING, episode_failure, failure_stop_reason
from agentrl.support.concurrency import stray_cancellation_raises, task_group
from agentrl.support.user_code import boundary
from agentrl.types import EpisodeFailure, Group, MemberAdvantages, StopReason, Task, Trajectory, Turn
from agentrl.workflow import GroupWorkflow

GroupScorer: TypeAlias = Callable[[Task, tuple[Trajectory, ...]], Awaitable[tuple[Trajectory, ...]]]
"""Returns the episodes of a group with new final rewards, or all as failures, such as a `partial` of `score_episodes`."""


class EpisodeRunner(Protocol):
    """Runs one episode, such as a `functools.partial` of `run_policy_episode` that lacks only task and id."""

    async def __call__(self, task: Task, *, episode_id: str) -> Trajectory:
        """Return the trajectory of the episode; a failed one has `failure` set."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class DroppedGroup:
    """A group that cannot be trained."""

    index: int
    """Admission number."""
    task: Task
    reason: str
    """The name under which the drop is counted: `episode_failed:` and the most frequent stop reason of the failures."""
    failures: tuple[EpisodeFailure, ...]
    """The failures of all failed attempts, in order."""


async def run_group(
    task: Task,
    *,
    index: int,
    group_size: int,
    admitted_version: int,
    run: EpisodeRunner,
    rollout: RolloutConfig,
    slots: anyio.Semaphore,
    score: GroupScorer | None = None,
    on_episode: Callable[[Trajectory], object] = lambda trajectory: None,
    on_started: Callable[[], object] = lambda: None,
) -> Group | DroppedGroup:
    """Return the group of `group_size` episodes of `task`, or a record of its failures.

    A failed member runs again from the start, up to `episode_retries` times, and keeps its slot. When all its attempts have
    failed, policy `drop` cancels the others and drops the group; `keep` keeps it if `LEAST_KEPT` members succeed. Both
    prefer episodes that do not fail, which biases the gradient where failure depends on the policy.

    Args:
        task: the task of all episodes.
        index: admission number of the group.
        group_size: episodes.
        admitted_version: policy version at admission.
        run: runs one episode; its id is `<index>.<member>.<attempt>`.
        rollout: retries and the rule for incomplete groups.
        slots: one for each episode in flight; members acquire them one after the other, so groups start in order.
        score: scores the members together once all have ended, without a slot; None: they keep the rewards they have.
        on_episode: called with every finished attempt; with `score`, after the scoring, where there is one.
        on_started: called when every member has its slot, and again at the end.
    """
    members = _Members(task, index, run, rollout, on_episode, slots, reports_later=score is not None)
    try:
        async with task_group() as tasks:
            for member in range(group_size):
                # One after the other, here and not in the tasks: a group that opened first gets its slots first.
                await slots.acquire()
                members.holding.add(member)
                tasks.start_soon(members.run, member, tasks)
            on_started()
        # Without a slot: a judge may take long, and no episode has to wait for it.
        if score is not None and members.suffice(group_size):
            await members.score(score)
    finally:
        # Again, for a group that was cancelled before all its members had started.
        on_started()
        members.report_all()
        for _ in members.holding:  # cancelled before they started
            slots.release()
    return members.outcome(group_size, admitted_version)


_turns: ContextVar[list[Turn] | None] = ContextVar("_turns", default=None)
"""Receives the turns of an episode that was cancelled, in `run_recorded`."""


async def run_recorded(run: EpisodeRunner, task: Task, *, episode_id: str) -> Trajectory:
    """Return the trajectory of an episode; a failure with its turns if a workflow cancelled the task that runs it."""
    turns: list[Turn] = []
    started_s = time.perf_counter()
    token = _turns.set(turns)
    try:
        async with stray_cancellation_raises(lambda: WorkflowError("the task of the episode was cancelled")):
            trajectory = await run(task, episode_id=episode_id)
            turns += trajectory.turns  # for a cancellation that only the end of the block delivers
            return trajectory
    except WorkflowError:
        cancelled = cancelled_episode(task, episode_id, turns)
        return replace(cancelled, started_s=started_s, ended_s=time.perf_counter())
    finally:
        _turns.reset(token)


def keep_turns(turns: Sequence[Turn]) -> None:
    """Leave the turns of an episode that is being cancelled to the `run_recorded` around it, where there is one."""
    kept = _turns.get()
    if kept is not None:
        kept += turns


def cancelled_episode(task: Task, episode_id: str, turns: Sequence[Turn] = ()) -> Trajectory:
    """Return the record of an episode whose asyncio task a workflow cancelled, with the turns recorded before that."""
    message = (
        f"task {task.id}, episode {episode_id}: a workflow cancelled the asyncio task of this episode; a workflow may "
        "cancel only the tasks that it starts, best with the cancel scope of its own task group"
    )
    failure = EpisodeFailure(kind=WorkflowError.__name__, message=message, traceback="")
    return Trajectory(
        episode_id=episode_id,
        task_id=task.id,
        turns=tuple(turns),
        stop_reason=StopReason.WORKFLOW_ERROR,
        failure=failure,
        task=task,
    )


class _Members:
    def __init__(
        self,
        task: Task,
        index: int,
        run: EpisodeRunner,
        rollout: RolloutConfig,
        on_episode: Callable[[Trajectory], object],
        slots: anyio.Semaphore,
        *,
        reports_later: bool,
    ) -> None:
        self.finished: dict[int, Trajectory] = {}
        self.failed: list[Trajectory] = []
        self.holding: set[int] = set()
        self._task = task
        self._index = index
        self._run = run
        self._rollout = rollout
        self._on_episode = on_episode
        self._slots = slots
        self._reports_later = reports_later
        self._unreported: set[int] = set()

    def suffice(self, group_size: int) -> bool:
        kept = self._rollout.incomplete_group == "keep"
        return len(self.finished) >= (min(LEAST_KEPT, group_size) if kept else group_size)

    async def score(self, score: GroupScorer) -> None:
        members = sorted(self.finished)
        scored = await score(self._task, tuple(self.finished[member] for member in members))
        self.finished = dict(zip(members, scored, strict=True))

    def report_all(self) -> None:
        """Report the members whose report has waited for their score, and take out those that the scoring has failed."""
        waiting, self._unreported = sorted(self._unreported), set()
        for member in waiting:
            trajectory = self.finished[member]
            if trajectory.failure is not None:
                self.failed.append(self.finished.pop(member))
            self._on_episode(trajectory)

    def outcome(self, group_size: int, admitted_version: int) -> Group | DroppedGroup:
        if self.suffice(group_size):
            episodes = tuple(self.finished[member] for member in sorted(self.finished))
            return Group(index=self._index, task=self._task, episodes=episodes, admitted_version=admitted_version)
        if not self.failed:  # a member whose task was cancelled before its first step ends the group and leaves no record
            self.failed.append(cancelled_episode(self._task, f"{self._index}"))
        # One name for the counter, although members may have failed for several reasons.
        [(most, _)] = Counter(str(attempt.stop_reason) for attempt in self.failed).most_common(1)
        failures = tuple(attempt.failure for attempt in self.failed if attempt.failure is not None)
        return DroppedGroup(index=self._index, task=self._task, reason=f"episode_failed:{most}", failures=failures)

    async def run(self, member: int, tasks: TaskGroup) -> None:
        try:
            succeeded = await self._attempts(member)
        finally:
            self.holding.remove(member)
            self._slots.release()
        # The group is lost already; the members that still run would only take slots.
        if not succeeded and self._rollout.incomplete_group == "drop":
            tasks.cancel_scope.cancel()

    async def _attempts(self, member: int) -> bool:
        for attempt in range(self._rollout.episode_retries + 1):
            trajectory = await run_recorded(self._run, self._task, episode_id=f"{self._index}.{member}.{attempt}")
            # A record that is written before the scoring would hold a reward that is not trained.
            if trajectory.failure is None and self._reports_later:
                self._unreported.add(member)
            else:
                self._on_episode(trajectory)
            if trajectory.failure is None:
                self.finished[member] = trajectory
                return True
            self.failed.append(trajectory)
        return False


@dataclass(frozen=True, slots=True)
class _ScoreFailure:
    stop_reason: StopReason
    failure: EpisodeFailure


async def score_episodes(
    workflow: GroupWorkflow, task: Task, episodes: Sequence[Trajectory], *, rollout: RolloutConfig
) -> tuple[Trajectory, ...]:
    """Return the episodes with the scores of `workflow.score_group` as final rewards, or with its advantages.

    A failed attempt is repeated up to `episode_retries` times, each time within `episode_timeout_s`; the metric
    `score_retries` counts the repetitions. If all attempts fail, every episode is a failure with the last reason.
    """
    with watch_metrics() as noted:
        scored = await _score_once(workflow, task, episodes, rollout.episode_timeout_s)
        retries = 0
        while isinstance(scored, _ScoreFailure) and retries < rollout.episode_retries:
            scored = await _score_once(workflow, task, episodes, rollout.episode_timeout_s)
            retries += 1
    metrics = noted | ({"score_retries": float(retries)} if retries else {})
    marked = [replace(episode, metrics={**episode.metrics, **metrics}) for episode in episodes]
    if isinstance(scored, _ScoreFailure):
        failure, reason = scored.failure, scored.stop_reason
        return tuple(replace(each, stop_reason=reason, final_reward=None, failure=failure) for each in marked)
    if isinstance(scored, MemberAdvantages):
        return tuple(replace(each, advantage=given) for each, given in zip(marked, scored.values, strict=True))
    return tuple(
        replace(each, final_reward=score, reward_parts=each.turn_reward_parts)
        for each, score in zip(marked, scored, strict=True)
    )


async def _score_once(
    workflow: GroupWorkflow, task: Task, episodes: Sequence[Trajectory], timeout_s: float
) -> list[float] | MemberAdvantages | _ScoreFailure:
    where = f"{workflow.name}.score_group, task {task.id}, {len(episodes)} episodes"
    deadline = anyio.current_time() + timeout_s
    scores: list[float] | MemberAdvantages = []
    try:
        with anyio.CancelScope(deadline=deadline), watch_faults() as faults:
            async with stray_cancellation_raises(lambda: WorkflowError(f"{where}: the task that scores was cancelled")):
                with boundary(WorkflowError, where):
                    async with task_group():  # raises the error of a task group of the workflow by itself
                        values = await workflow.score_group(task, episodes)
            scores = _checked(values, len(episodes), where)
            # A scorer that caught the fault of its environment has compared what it could not measure.
            if faults:
                raise next(iter(faults.values()))
    except RUN_ENDING:
        raise
    except AgentRLError as error:
        return _ScoreFailure(failure_stop_reason(error), episode_failure(error))
    if anyio.current_time() >= deadline:
        message = f"{where}: not finished within episode_timeout_s = {timeout_s:g}"
        return _ScoreFailure(StopReason.DEADLINE, EpisodeFailure(kind="TimeoutError", message=message, traceback=""))
    return scores


def _checked(values: object, count: int, where: str) -> list[float] | MemberAdvantages:
    scores = values.values if isinstance(values, MemberAdvantages) else values
    if not isinstance(scores, Sequence) or isinstance(scores, str) or len(scores) != count:
        raise WorkflowError(f"{where}: expected a list of {count} scores, one for each episode, got {scores!r:.80}")
    checked = [check_reward(value, f"{where}, episode {index}") for index, value in enumerate(scores)]
    return MemberAdvantages(checked) if isinstance(values, MemberAdvantages) else checked
