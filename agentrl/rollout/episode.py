"""Run one episode: a workflow on a task, under its own deadline and budgets.

Invariant: an episode ends as a trajectory. A trajectory without a usable result has `failure` set and no final reward,
never a reward of 0. Only an error that ends the run, or a cancellation from outside, is raised.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Protocol
from uuid import uuid4

import anyio
import anyio.lowlevel
from openai import AsyncOpenAI

from agentrl.client import Client, EndpointBackend, EpisodeSettings, PolicyBackend
from agentrl.client.config import SamplingConfig
from agentrl.env import watch_faults, watch_metrics
from agentrl.episode.checks import check_reward, check_reward_time
from agentrl.errors import (
    AgentRLError,
    EnvironmentFault,
    EpisodeLimit,
    InvariantError,
    WorkflowError,
)
from agentrl.inference.backend import Backend
from agentrl.rollout.config import RolloutConfig
from agentrl.rollout.failure import RUN_ENDING, episode_failure, failure_stop_reason, raising_line
from agentrl.rollout.group import keep_turns, score_episodes
from agentrl.support.concurrency import OutsideWork, flatten, noticing_cancellation, watch_outside_work
from agentrl.support.user_code import boundary
from agentrl.tokens.renderer import Renderer
from agentrl.types import EpisodeFailure, StopReason, Task, Trajectory, Turn
from agentrl.workflow import GroupWorkflow, RolloutWorkflow


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


async def run_policy_episode(
    workflow: RolloutWorkflow,
    task: Task,
    *,
    backend: Backend,
    renderer: Renderer,
    rollout: RolloutConfig,
    sampling: SamplingConfig,
    episode_id: str | None = None,
    seed: int | None = None,
    on_turn: Callable[[Turn], None] | None = None,
) -> Trajectory:
    """Return the trajectory of one episode; a failed one has `failure` set.

    Ends: `run` returns a reward (COMPLETED); a call reaches a limit (TURN_LIMIT, TOKEN_LIMIT, CONTEXT_LIMIT: complete, with
    the workflow's `limit_reward`); the deadline passes (DEADLINE: complete, with `deadline_reward`, if that is the policy's
    doing); the workflow raises or returns no reward (WORKFLOW_ERROR); an environment breaks (ENVIRONMENT_FAULT); no server
    can answer (SERVER_ERROR). An episode whose last call failed, or whose environment or tool broke, fails so even if the
    workflow catches the error. A workflow that swallows its cancellation ends as DEADLINE when it returns.

    `seed` is of the run; seeds of the calls are made from it. None leaves them to the servers.
    """
    settings = _settings(task, rollout, episode_id, on_turn)
    client = Client(PolicyBackend(backend, renderer, sampling, settings, seed=seed))
    return await run_client_episode(workflow, task, client, timeout_s=rollout.episode_timeout_s)


async def run_endpoint_episode(
    workflow: RolloutWorkflow,
    task: Task,
    *,
    endpoint: AsyncOpenAI,
    model: str,
    rollout: RolloutConfig,
    sampling: SamplingConfig | None = None,
    episode_id: str | None = None,
    on_turn: Callable[[Turn], None] | None = None,
) -> Trajectory:
    """Return the trajectory, without token ids, of one episode against any OpenAI-compatible endpoint.

    An endpoint that reports no `usage` cannot keep to `max_episode_tokens`: SERVER_ERROR.
    """
    settings = _settings(task, rollout, episode_id, on_turn)
    client = Client(EndpointBackend(endpoint, model, settings, sampling=sampling))
    return await run_client_episode(workflow, task, client, timeout_s=rollout.episode_timeout_s)


async def run_client_episode(workflow: RolloutWorkflow, task: Task, client: Client, *, timeout_s: float) -> Trajectory:
    """Return the trajectory of one episode whose client was made before, such as one that replays a record."""
    started_s = time.perf_counter()
    with watch_metrics() as noted:
        trajectory = await _play(workflow, task, client, timeout_s)
    metrics = {**trajectory.metrics, **noted}
    return replace(trajectory, metrics=metrics, task=task, started_s=started_s, ended_s=time.perf_counter())


def _settings(
    task: Task, rollout: RolloutConfig, episode_id: str | None, on_turn: Callable[[Turn], None] | None
) -> EpisodeSettings:
    return EpisodeSettings(
        episode_id=episode_id or uuid4().hex,
        task_id=task.id,
        max_turns=rollout.max_turns,
        max_episode_tokens=rollout.max_episode_tokens,
        on_turn=on_turn,
    )


class LocalRunner:
    """A `PolicyRunner` that runs episodes on the event loop of this process."""

    def __init__(
        self, workflow: RolloutWorkflow, *, renderer: Renderer, rollout: RolloutConfig, seed: int | None = None
    ) -> None:
        self._workflow, self._renderer, self._rollout, self._seed = workflow, renderer, rollout, seed
        self._backend: Backend | None = None

    @asynccontextmanager
    async def opened(self, backend: Backend) -> AsyncGenerator[None]:
        self._backend = backend
        async with self._workflow.opened():
            yield

    async def play(
        self, task: Task, *, episode_id: str, sampling: SamplingConfig, on_turn: Callable[[Turn], None]
    ) -> Trajectory:
        assert self._backend is not None, "play() is for the inside of opened()"
        return await run_policy_episode(
            self._workflow,
            task,
            backend=self._backend,
            renderer=self._renderer,
            rollout=self._rollout,
            sampling=sampling,
            episode_id=episode_id,
            seed=self._seed,
            on_turn=on_turn,
        )

    async def score(self, task: Task, episodes: tuple[Trajectory, ...]) -> tuple[Trajectory, ...]:
        if not isinstance(self._workflow, GroupWorkflow):
            raise InvariantError(f"{self._workflow.name} does not score groups, and the engine asked it to")
        return await score_episodes(self._workflow, task, episodes, rollout=self._rollout)


@dataclass(frozen=True, slots=True)
class _Failure:
    stop_reason: StopReason
    failure: EpisodeFailure


async def _play(workflow: RolloutWorkflow, task: Task, client: Client, timeout_s: float) -> Trajectory:
    episode = client.episode
    where = f"{workflow.name}.rollout, task {task.id}, episode {episode.id}"
    deadline = anyio.current_time() + timeout_s
    ending: Trajectory | _Failure | None = None
    with watch_faults() as faults, watch_outside_work(deadline) as outside:
        try:
            with anyio.CancelScope(deadline=deadline):
                async with noticing_cancellation(episode.end.come):
                    ending = await _attempt(workflow, task, client, where, faults, outside)
        except anyio.get_cancelled_exc_class():
            # The caller of a cancelled episode gets no trajectory, but records the turns that were played.
            keep_turns(episode.turns)
            raise
    await anyio.lowlevel.checkpoint_if_cancelled()  # a workflow that swallowed the run's cancellation ends here
    # Only an episode that the policy itself spent may end as a result: waiting for a slow tool or server is no fault of
    # it.
    if ending is None and not faults and _is_policys_doing(deadline, client, outside, timeout_s):
        ending = _limited(workflow, client, StopReason.DEADLINE)
    # A result that came after the deadline is not taken, or a workflow that blocks would have more time than others.
    elif ending is None or anyio.current_time() >= deadline:
        late = "" if ending is None else "; it returned late, after blocking or swallowing its cancellation"
        message = f"{where}: not finished within episode_timeout_s = {timeout_s:g}, after {len(episode.turns)} turns{late}"
        ending = _Failure(StopReason.DEADLINE, EpisodeFailure(kind="TimeoutError", message=message, traceback=""))
    if isinstance(ending, Trajectory):
        return ending
    try:
        return client.close(ending.stop_reason, failure=ending.failure)
    except WorkflowError:  # the workflow closed the client before it failed
        return Trajectory(
            episode_id=episode.id,
            task_id=task.id,
            turns=tuple(episode.turns),
            stop_reason=ending.stop_reason,
            failure=ending.failure,
        )


def _is_policys_doing(deadline: float, client: Client, outside: OutsideWork, timeout_s: float) -> bool:
    """Return whether the policy's calls are the reason why the episode missed its deadline, which has passed."""
    episode = client.episode
    if not (episode.is_open and episode.turns) or outside.ran_into_deadline:
        return False
    answered = client.unresolved_error is None or client.limit_reached is not None
    return answered and episode.calls.filled_time(deadline, timeout_s)


async def _attempt(
    workflow: RolloutWorkflow,
    task: Task,
    client: Client,
    where: str,
    faults: Mapping[str, EnvironmentFault],
    outside: OutsideWork,
) -> Trajectory | _Failure:
    try:
        with boundary(WorkflowError, where):
            result = await _unwrapped(workflow, task, client)
        trajectory = _check_trajectory(result, client.episode.id, where)
        return trajectory if trajectory.failure is not None else _as_it_ended(trajectory, client, faults)
    except RUN_ENDING:
        raise
    except EpisodeLimit as error:
        # Calls that still run belong to the episode; they become turns before it is closed.
        await client.backend.settle()
        return _limited(workflow, client, client.limit_reached or StopReason.TURN_LIMIT, error)
    except AgentRLError as error:
        failure = episode_failure(error)
        # An error right after an answer may be the answer's doing: it is counted apart, by the line that raised.
        if isinstance(error, WorkflowError) and _follows_a_turn(client, outside):
            failure = replace(failure, after_turn=raising_line(error))
        return _Failure(failure_stop_reason(error), failure)
    except anyio.get_cancelled_exc_class() as error:
        if _cancellation_is_ours():
            raise
        # Awaiting a task that was cancelled elsewhere raises in this task, which was not cancelled. If the exception
        # passed, the episode would vanish.
        stray = WorkflowError(f"{where} raised {type(error).__name__}, but the episode was not cancelled: {error}")
        stray.__cause__ = error
        return _Failure(StopReason.WORKFLOW_ERROR, episode_failure(stray))


def _limited(
    workflow: RolloutWorkflow, client: Client, reason: StopReason, cause: EpisodeLimit | None = None
) -> Trajectory | _Failure:
    """Complete an episode that a limit ended; a final reward that the workflow has set stays."""
    name, value = "limit_reward", workflow.limit_reward
    if reason is StopReason.DEADLINE and workflow.deadline_reward is not None:
        name, value = "deadline_reward", workflow.deadline_reward
    try:
        reward = None if client.episode.final_reward is not None else check_reward(value, f"{workflow.name}.{name}")
        return client.close(reason, final_reward=reward)
    except WorkflowError as refused:
        refused.__cause__ = cause
        return _Failure(StopReason.WORKFLOW_ERROR, episode_failure(refused))


def _follows_a_turn(client: Client, outside: OutsideWork) -> bool:
    """Return whether the last event of the episode is a turn: no failed call, and no outside work that began later."""
    turns = client.episode.turns
    if not turns or client.unresolved_error is not None:
        return False
    return outside.begun_s <= (turns[-1].ended_s or -math.inf)


def _as_it_ended(trajectory: Trajectory, client: Client, faults: Mapping[str, EnvironmentFault]) -> Trajectory:
    """Return the workflow's result, or a failure where the workflow caught an error: its reward would blame the policy."""
    if client.limit_reached is not None:
        return replace(trajectory, stop_reason=client.limit_reached)
    error = client.unresolved_error or next(iter(faults.values()), None)
    if error is None:
        return _as_failed(trajectory, _no_call(trajectory)) if _made_no_call(trajectory, client) else trajectory
    failure = episode_failure(error)
    message = f"the workflow caught this error and returned {trajectory.final_reward}: {failure.message}"
    reason = failure_stop_reason(error)
    return replace(trajectory, stop_reason=reason, final_reward=None, failure=replace(failure, message=message))


def _made_no_call(trajectory: Trajectory, client: Client) -> bool:
    """Return whether a program was to play the episode and never asked the policy for what is trained."""
    return client.episode.needs_call and all(turn.left_out for turn in trajectory.turns)


def _no_call(trajectory: Trajectory) -> WorkflowError:
    rewarded = f"and the reward would be {trajectory.final_reward}"
    if trajectory.turns:
        return WorkflowError(
            f"the program made no call of its agent, {rewarded}: all {len(trajectory.turns)} are side calls by the rule of "
            "`side_calls`; narrow the rule, or set `no_call: allow`"
        )
    return WorkflowError(
        f"the program made no call of the policy, {rewarded}; does it read OPENAI_BASE_URL or ANTHROPIC_BASE_URL? "
        "`no_call: allow` takes such episodes as they are"
    )


def _as_failed(trajectory: Trajectory, error: WorkflowError) -> Trajectory:
    return replace(trajectory, stop_reason=failure_stop_reason(error), final_reward=None, failure=episode_failure(error))


async def _unwrapped(workflow: RolloutWorkflow, task: Task, client: Client) -> object:
    """Run the workflow; of an exception group, raise the error that matters most."""
    try:
        return await workflow.rollout(task, client)
    except BaseExceptionGroup as group:
        cancelled, rest = group.split(anyio.get_cancelled_exc_class())
        errors = list(flatten(rest)) if rest is not None else []
        # An error that ends the run must not be hidden by one that only fails this episode.
        for error in errors:
            if isinstance(error, (*RUN_ENDING, KeyboardInterrupt)):
                raise error from group
        if cancelled is not None and (not errors or _cancellation_is_ours()):
            raise cancelled from None
        # A real error goes before a limit: a limit would complete the episode and pay a reward.
        raise min(errors, key=lambda error: isinstance(error, EpisodeLimit)) from group


def _check_trajectory(result: object, identity: str, where: str) -> Trajectory:
    if not isinstance(result, Trajectory):
        raise WorkflowError(
            f"{where}: expected a Trajectory, got {type(result).__name__}; "
            "return client.close(...), or implement `run` instead"
        )
    if result.episode_id != identity:
        raise WorkflowError(f"{where}: returned the trajectory of another episode, {result.episode_id}")
    # An episode without any reward has no advantage, and would train nothing without a word.
    rewarded = result.final_reward is not None or any(turn.reward is not None for turn in result.turns)
    if result.failure is None and not rewarded:
        raise WorkflowError(f"{where}: the trajectory has no reward; give client.close a final_reward, or reward a turn")
    try:
        for index, turn in enumerate(result.turns):
            check_reward_time(turn, f"{where}: turn {index}")
    except InvariantError as error:
        raise WorkflowError(f"{error}; set the rewards of turns with client.reward, before client.close") from error
    return result


def _cancellation_is_ours() -> bool:
    """Return whether this episode, or anything around it, was cancelled."""
    # Under both backends, a cancelled scope has this deadline; asyncio alone can also cancel a task without a scope.
    if anyio.current_effective_deadline() == -math.inf:
        return True
    try:
        task = asyncio.current_task()
    except RuntimeError:  # trio, where a cancellation always has a scope
        return True
    return task is None or task.cancelling() > 0
