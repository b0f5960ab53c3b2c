"""How an episode can end, and what is recorded of it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import suppress

import anyio
import numpy as np
import pytest

from agentrl.client import Client
from agentrl.client.tools import tool
from agentrl.env.faults import note_metric
from agentrl.errors import EnvironmentFault, EpisodeLimit, InvariantError, ServerError, ServerUnavailable, WorkflowError
from agentrl.rollout.config import RolloutConfig
from agentrl.rollout.episode import run_policy_episode
from agentrl.servers.scripted.server import Fault, ScriptedCall, ScriptedReply
from agentrl.tokens.renderer import Renderer
from agentrl.tokens.verify import verify
from agentrl.types import StopReason, Task, Trajectory, Turn
from agentrl.workflow import RolloutWorkflow
from tests.rollout.harness import PATIENCE_S, SAMPLING, TASK, Judge, ask, episode, make_server, says, workflow_of


async def test_an_episode_becomes_a_trajectory_with_its_turns_and_reward(renderer: Renderer) -> None:
    trajectory = await episode(Judge(), renderer)
    assert (trajectory.stop_reason, trajectory.final_reward, trajectory.failure) == (StopReason.COMPLETED, 1.0, None)
    assert (trajectory.episode_id, trajectory.task_id, len(trajectory.turns)) == ("e0", "t0", 1)
    assert trajectory.turns[0].message["content"] == "good"
    verify(trajectory)


@pytest.mark.parametrize("value", [math.nan, math.inf, np.float16(np.inf), "1.0", None, [1.0]], ids=repr)
async def test_what_is_not_a_finite_number_is_a_failed_episode_and_never_a_reward(renderer: Renderer, value: object) -> None:
    trajectory = await episode(workflow_of(lambda task, client: value), renderer)
    assert trajectory.stop_reason is StopReason.WORKFLOW_ERROR
    assert trajectory.final_reward is None
    assert trajectory.failure is not None
    assert trajectory.failure.kind == "RewardError"
    assert "must be a finite number" in trajectory.failure.message


async def test_an_exception_of_the_workflow_is_recorded_with_its_traceback_and_the_turns_before_it(
    renderer: Renderer,
) -> None:
    async def run(task: Task, client: Client) -> float:
        await ask(client, "hello")
        raise KeyError("no such key")

    trajectory = await episode(workflow_of(run), renderer)
    assert trajectory.stop_reason is StopReason.WORKFLOW_ERROR
    assert trajectory.failure is not None
    assert "raised KeyError: 'no such key'" in trajectory.failure.message
    assert "in run" in trajectory.failure.traceback
    assert "t0" in trajectory.failure.message
    assert len(trajectory.turns) == 1


class Mute(Exception):
    """Cannot say what is wrong."""

    def __str__(self) -> str:
        raise ValueError("no words")


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (SystemExit(0), "raised SystemExit: 0"),
        (BaseExceptionGroup("of a task group", [SystemExit(2)]), "raised SystemExit: 2"),
        (Mute(), "raised Mute: (its __str__ raised ValueError)"),
    ],
    ids=["exit", "exit in a group", "mute"],
)
async def test_neither_an_exit_nor_an_error_without_words_leaves_the_episode(
    renderer: Renderer, error: BaseException, told: str
) -> None:
    def run(task: Task, client: Client) -> float:
        raise error

    trajectory = await episode(workflow_of(run), renderer)
    assert trajectory.stop_reason is StopReason.WORKFLOW_ERROR
    assert trajectory.failure is not None
    assert told in trajectory.failure.message


async def test_an_environment_fault_is_told_from_a_workflow_error(renderer: Renderer) -> None:
    def run(task: Task, client: Client) -> float:
        raise EnvironmentFault("the simulator crashed")

    trajectory = await episode(workflow_of(run), renderer)
    assert trajectory.stop_reason is StopReason.ENVIRONMENT_FAULT


@pytest.mark.parametrize(
    "fault",
    [
        Fault.REFUSE,
        Fault.DIE,
        Fault.SHORT_LOGPROBS,
        Fault.EMPTY,
        Fault.OUTSIDE_VOCABULARY,
        Fault.NAN_LOGPROB,
        Fault.BAD_REQUEST,
    ],
)
async def test_a_server_that_cannot_answer_is_a_failed_episode(renderer: Renderer, fault: Fault) -> None:
    trajectory = await episode(Judge(), renderer, script=lambda call: ScriptedReply(output="good", fault=fault))
    assert trajectory.stop_reason is StopReason.SERVER_ERROR
    assert trajectory.failure is not None
    assert trajectory.final_reward is None


async def test_a_hanging_workflow_ends_at_the_deadline(renderer: Renderer) -> None:
    trajectory = await episode(
        workflow_of(lambda task, client: anyio.sleep_forever()), renderer, rollout=RolloutConfig(episode_timeout_s=0.05)
    )
    assert trajectory.stop_reason is StopReason.DEADLINE
    assert trajectory.failure is not None
    assert "episode_timeout_s = 0.05" in trajectory.failure.message


async def test_a_hanging_server_ends_at_the_deadline_and_its_request_is_aborted(renderer: Renderer) -> None:
    server = make_server(renderer, lambda call: ScriptedReply(output="good", fault=Fault.HANG))
    for deadline_s in (0.05, 1.0, 30.0):
        rollout = RolloutConfig(episode_timeout_s=deadline_s)
        trajectory = await run_policy_episode(
            Judge(), TASK, backend=server, renderer=renderer, rollout=rollout, sampling=SAMPLING
        )
        assert trajectory.stop_reason is StopReason.DEADLINE
        if server.calls:  # on a busy machine a short deadline may come before the call
            break
    assert len(server.aborted) == 1


async def test_a_timeout_inside_the_workflow_is_not_the_episode_deadline(renderer: Renderer) -> None:
    async def run(task: Task, client: Client) -> float:
        with anyio.fail_after(0.01):
            await anyio.sleep_forever()
        return 1.0

    trajectory = await episode(workflow_of(run), renderer)
    assert trajectory.stop_reason is StopReason.WORKFLOW_ERROR
    assert trajectory.failure is not None
    assert "TimeoutError" in trajectory.failure.message


async def test_a_workflow_that_blocks_the_thread_past_the_deadline_is_reported_when_it_returns(renderer: Renderer) -> None:
    def run(task: Task, client: Client) -> float:
        time.sleep(0.03)
        return 1.0

    trajectory = await episode(workflow_of(run), renderer, rollout=RolloutConfig(episode_timeout_s=0.01))
    assert trajectory.stop_reason is StopReason.DEADLINE
    assert trajectory.failure is not None
    assert "returned late" in trajectory.failure.message
    assert trajectory.final_reward is None


async def test_a_workflow_that_swallows_its_cancellation_is_reported_as_late(renderer: Renderer) -> None:
    async def run(task: Task, client: Client) -> float:
        try:
            await anyio.sleep_forever()
        except BaseException:  # noqa: BLE001 - what a careless workflow does
            return 1.0
        return 0.0

    trajectory = await episode(workflow_of(run), renderer, rollout=RolloutConfig(episode_timeout_s=0.02))
    assert trajectory.stop_reason is StopReason.DEADLINE


class Endless(RolloutWorkflow):
    """Calls the model until a budget ends it."""

    def __init__(self, limit_reward: float = 0.0) -> None:
        self.limit_reward = limit_reward

    async def run(self, task: Task, client: Client) -> float:
        messages: list[dict[str, str]] = [{"role": "user", "content": "go on"}]
        while True:
            completion = await client.chat.completions.create(messages=messages)
            messages.append({"role": "assistant", "content": completion.choices[0].message.content or ""})
            messages.append({"role": "user", "content": "more"})


@pytest.mark.parametrize(
    ("budget", "reason"), [({"max_turns": 3}, StopReason.TURN_LIMIT), ({"max_episode_tokens": 5}, StopReason.TOKEN_LIMIT)]
)
async def test_a_spent_budget_completes_the_episode_with_the_limit_reward(
    renderer: Renderer, budget: dict[str, int], reason: StopReason
) -> None:
    rollout = RolloutConfig(**budget)  # pyright: ignore[reportArgumentType] - integers
    default = await episode(Endless(), renderer, rollout=rollout)
    assert (default.stop_reason, default.final_reward, default.failure) == (reason, 0.0, None)
    paid = await episode(Endless(limit_reward=-0.5), renderer, rollout=rollout)
    assert (paid.stop_reason, paid.final_reward, paid.failure) == (reason, -0.5, None)
    assert len(paid.turns) == len(default.turns) > 0


async def test_a_full_context_completes_the_episode_and_is_counted_by_its_own_name(renderer: Renderer) -> None:
    trajectory = await episode(Endless(), renderer.within(60))
    assert (trajectory.stop_reason, trajectory.final_reward, trajectory.failure) == (StopReason.CONTEXT_LIMIT, 0.0, None)


async def test_a_workflow_that_catches_the_limit_keeps_its_own_reward(renderer: Renderer) -> None:
    async def run(task: Task, client: Client) -> float:
        try:
            return await Endless().run(task, client)
        except EpisodeLimit:
            return 0.25

    trajectory = await episode(workflow_of(run), renderer, rollout=RolloutConfig(max_turns=2))
    assert (trajectory.stop_reason, trajectory.final_reward, trajectory.failure) == (StopReason.TURN_LIMIT, 0.25, None)


def refuses(*indices: int) -> Callable[[ScriptedCall], ScriptedReply]:
    """Return a script that refuses the calls with these indices."""
    return lambda call: ScriptedReply(output="good", fault=Fault.REFUSE if call.index in indices else None)


async def careless(task: Task, client: Client) -> float:
    """Asks three times and returns 0.0 for each error, as agent frameworks do."""
    reward = 0.0
    for _ in range(3):
        try:
            reward = float(await ask(client, task["question"]) == task["answer"])
        except Exception:  # noqa: BLE001 - what the test is about
            reward = 0.0
    return reward


async def test_an_outage_that_the_workflow_catches_is_a_failure_and_no_reward(renderer: Renderer) -> None:
    trajectory = await episode(workflow_of(careless), renderer, script=refuses(2))
    assert (trajectory.stop_reason, trajectory.final_reward) == (StopReason.SERVER_ERROR, None)
    assert trajectory.failure is not None
    assert "the workflow caught this error and returned 0.0" in trajectory.failure.message
    assert len(trajectory.turns) == 2


async def test_a_failed_call_that_a_later_call_makes_good_is_no_failure(renderer: Renderer) -> None:
    trajectory = await episode(workflow_of(careless), renderer, script=refuses(0, 1))
    assert (trajectory.stop_reason, trajectory.final_reward, trajectory.failure) == (StopReason.COMPLETED, 1.0, None)


async def test_a_call_that_ran_during_the_failure_does_not_make_it_good(renderer: Renderer) -> None:
    async def run(task: Task, client: Client) -> float:
        asked = anyio.Event()

        async def slow() -> None:
            stream = await client.chat.completions.create(messages=[{"role": "user", "content": "slow"}], stream=True)
            await anext(stream)
            asked.set()
            await failed.wait()
            async for _ in stream:
                pass

        failed = anyio.Event()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(slow)
            await asked.wait()
            with suppress(ServerError):
                await ask(client, "fails")
            failed.set()
        return 1.0

    trajectory = await episode(workflow_of(run), renderer, script=refuses(1))
    assert trajectory.stop_reason is StopReason.SERVER_ERROR


async def test_a_refused_argument_that_the_workflow_catches_is_a_failure(renderer: Renderer) -> None:
    async def run(task: Task, client: Client) -> float:
        with suppress(WorkflowError):
            await client.chat.completions.create(messages=[{"role": "user", "content": "go"}], n=2)
        return 0.0

    trajectory = await episode(workflow_of(run), renderer)
    assert (trajectory.stop_reason, trajectory.final_reward) == (StopReason.WORKFLOW_ERROR, None)


async def test_a_broken_tool_that_the_workflow_catches_is_a_failure(renderer: Renderer) -> None:
    broken = [True]

    @tool
    def look() -> str:
        """Look something up."""
        if broken.pop():
            raise OSError("the index is gone")
        return "found"

    call = {"id": "1", "function": {"name": "look", "arguments": "{}"}}

    async def once(task: Task, client: Client) -> float:
        await ask(client, "go")
        with suppress(EnvironmentFault):
            await look.reply(call)
        return 0.0

    async def twice(task: Task, client: Client) -> float:
        await once(task, client)
        await look.reply(call)
        return 1.0

    trajectory = await episode(workflow_of(once), renderer)
    assert (trajectory.stop_reason, trajectory.final_reward) == (StopReason.ENVIRONMENT_FAULT, None)
    broken[:] = [False, True]
    assert (await episode(workflow_of(twice), renderer)).stop_reason is StopReason.COMPLETED


async def test_a_limit_reward_that_is_no_number_is_a_failed_episode(renderer: Renderer) -> None:
    trajectory = await episode(Endless(limit_reward=math.nan), renderer, rollout=RolloutConfig(max_turns=1))
    assert trajectory.stop_reason is StopReason.WORKFLOW_ERROR


async def test_errors_inside_a_task_group_of_the_workflow_are_attributed_like_others(renderer: Renderer) -> None:
    async def run(task: Task, client: Client) -> float:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask, client, "one")
            tasks.start_soon(ask, client, "two")
        return 1.0

    def script(call: ScriptedCall) -> ScriptedReply:
        return ScriptedReply(output="good", fault=Fault.REFUSE)

    trajectory = await episode(workflow_of(run), renderer, script=script)
    assert trajectory.stop_reason is StopReason.SERVER_ERROR
    assert trajectory.failure is not None
    assert trajectory.failure.kind == ServerUnavailable.__name__


async def test_parallel_calls_of_one_episode_are_turns_of_one_tree(renderer: Renderer) -> None:
    async def run(task: Task, client: Client) -> float:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask, client, "one")
            tasks.start_soon(ask, client, "two")
        return 1.0

    trajectory = await episode(workflow_of(run), renderer)
    assert trajectory.failure is None
    assert len(trajectory.turns) == len(trajectory.branches()) == 2


async def test_a_broken_invariant_leaves_the_episode_as_an_exception(renderer: Renderer) -> None:
    def run(task: Task, client: Client) -> float:
        raise InvariantError("digest mismatch")

    with pytest.raises(InvariantError, match="digest mismatch"):
        await episode(workflow_of(run), renderer)


class TokenLevel(RolloutWorkflow):
    """Overrides `rollout`; `result` makes its return value."""

    def __init__(self, result: object = None) -> None:
        self.result = result

    async def run(self, task: Task, client: Client) -> float:
        raise AssertionError("rollout is overridden")

    async def rollout(self, task: Task, client: Client) -> Trajectory:
        await client.generate([1, 2, 3])
        return self.result or client.close(StopReason.COMPLETED, final_reward=0.25)  # pyright: ignore[reportReturnType]


async def test_a_token_level_workflow_returns_its_own_trajectory(renderer: Renderer) -> None:
    trajectory = await episode(TokenLevel(), renderer)
    assert trajectory.final_reward == 0.25
    assert trajectory.turns[0].context_ids.tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ("done", "expected a Trajectory, got str"),
        (Trajectory(episode_id="other", task_id="t", turns=(), stop_reason=StopReason.COMPLETED), "another episode"),
        (Trajectory(episode_id="e0", task_id="t", turns=(), stop_reason=StopReason.COMPLETED), "has no reward"),
    ],
)
async def test_a_rollout_that_returns_anything_else_has_failed(renderer: Renderer, result: object, message: str) -> None:
    trajectory = await episode(TokenLevel(result), renderer)
    assert trajectory.stop_reason is StopReason.WORKFLOW_ERROR
    assert trajectory.failure is not None
    assert message in trajectory.failure.message
    assert len(trajectory.turns) == 1


async def test_a_workflow_that_closes_its_client_and_fails_keeps_its_turns(renderer: Renderer) -> None:
    async def run(task: Task, client: Client) -> float:
        await ask(client, "hello")
        client.close(StopReason.COMPLETED, final_reward=1.0)
        raise ValueError("too late")

    trajectory = await episode(workflow_of(run), renderer)
    assert (trajectory.stop_reason, trajectory.final_reward) == (StopReason.WORKFLOW_ERROR, None)
    assert len(trajectory.turns) == 1


async def test_the_client_of_a_failed_episode_refuses_further_calls(renderer: Renderer) -> None:
    kept: list[Client] = []

    def run(task: Task, client: Client) -> float:
        kept.append(client)
        raise ValueError

    await episode(workflow_of(run), renderer)
    with pytest.raises(RuntimeError, match="closed"):
        await ask(kept[0], "anybody there?")


async def test_turns_are_announced_as_they_are_recorded(renderer: Renderer) -> None:
    seen: list[Turn] = []
    await run_policy_episode(
        Judge(),
        TASK,
        backend=make_server(renderer, says("good")),
        renderer=renderer,
        rollout=RolloutConfig(),
        sampling=SAMPLING,
        on_turn=seen.append,
    )
    assert len(seen) == 1


async def test_cancelling_an_episode_cancels_its_workflow_and_returns_nothing(renderer: Renderer) -> None:
    ended = anyio.Event()
    started = anyio.Event()
    results: list[Trajectory] = []

    async def run(task: Task, client: Client) -> float:
        started.set()
        try:
            await anyio.sleep_forever()
        finally:
            ended.set()
        return 1.0

    async def outer() -> None:
        results.append(await episode(workflow_of(run), renderer))

    with anyio.fail_after(PATIENCE_S):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(outer)
            await started.wait()
            tasks.cancel_scope.cancel()
    assert ended.is_set()
    assert results == []


async def test_a_workflow_that_swallows_the_cancellation_of_the_run_does_not_survive_it(renderer: Renderer) -> None:
    started = anyio.Event()
    results: list[Trajectory] = []

    async def run(task: Task, client: Client) -> float:
        started.set()
        try:
            await anyio.sleep_forever()
        except BaseException:  # noqa: BLE001 - what a careless workflow does
            return 1.0
        return 0.0

    async def outer() -> None:
        results.append(await episode(workflow_of(run), renderer))

    with anyio.fail_after(PATIENCE_S):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(outer)
            await started.wait()
            tasks.cancel_scope.cancel()
    assert results == []


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_cancelled_task_the_workflow_awaits_does_not_make_the_episode_vanish(
    renderer: Renderer, anyio_backend: str
) -> None:
    import asyncio

    async def run(task: Task, client: Client) -> float:
        future: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        future.cancel()
        return await future

    trajectory = await episode(workflow_of(run), renderer)
    assert trajectory.stop_reason is StopReason.WORKFLOW_ERROR
    assert trajectory.failure is not None
    assert "the episode was not cancelled" in trajectory.failure.message


async def test_a_metric_that_a_tool_notes_stands_on_its_episode_alone(renderer: Renderer) -> None:
    async def run(task: Task, client: Client) -> float:
        await ask(client, "hello")
        note_metric("programs", 3.0)
        client.record(tries=2)
        return 1.0

    assert (await episode(workflow_of(run), renderer)).metrics == {"tries": 2.0, "programs": 3.0}
    assert "programs" not in (await episode(Judge(), renderer)).metrics
