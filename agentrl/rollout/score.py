"""Score the episodes of a group together, for workflows that compare them.

Invariant: either each episode gets its own score as final reward, or each its own advantage, or all of them become failures
with one reason. An error of the scoring is never a reward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import anyio

from agentrl.concurrency import stray_cancellation_raises, task_group
from agentrl.env import watch_faults
from agentrl.episode.checks import check_reward
from agentrl.errors import AgentRLError, WorkflowError, boundary
from agentrl.rollout.config import RolloutConfig
from agentrl.rollout.failure import RUN_ENDING, episode_failure, failure_stop_reason
from agentrl.sandbox.usage_record import sandbox_metrics, watch_sandboxes
from agentrl.types import EpisodeFailure, MemberAdvantages, StopReason, Task, Trajectory
from agentrl.workflow import GroupWorkflow


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
    with watch_sandboxes() as used:
        scored = await _score_once(workflow, task, episodes, rollout.episode_timeout_s)
        retries = 0
        while isinstance(scored, _ScoreFailure) and retries < rollout.episode_retries:
            scored = await _score_once(workflow, task, episodes, rollout.episode_timeout_s)
            retries += 1
    metrics = sandbox_metrics(used) | ({"score_retries": float(retries)} if retries else {})
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
    given = values.values if isinstance(values, MemberAdvantages) else values
    if not isinstance(given, Sequence) or isinstance(given, str) or len(given) != count:
        raise WorkflowError(f"{where}: expected a list of {count} scores, one for each episode, got {given!r:.80}")
    checked = [check_reward(value, f"{where}, episode {index}") for index, value in enumerate(given)]
    return MemberAdvantages(checked) if isinstance(values, MemberAdvantages) else checked
