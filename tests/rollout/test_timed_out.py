"""A timeout of the agent's own cuts a call, and what the call had sampled teaches exactly the policy gradient."""

from __future__ import annotations

from functools import partial
from typing import Any

import anyio
import openai
import pytest

from agentrl.client import CallTimeout, Client, ReplayBackend
from agentrl.rollout.episode import run_client_episode
from agentrl.servers.scripted.script import Hold, ScriptedReply
from agentrl.tokens.renderer import Renderer
from agentrl.types import StopReason, Task
from tests.rollout.harness import PATIENCE_S, TASK, episode, workflow_of
from tests.rollout.letters import Program, Stage, all_episodes, answer_to, check_gradient, opened
from tests.support.scripted import in_virtual_time

# An answer of three letters is held after its second one, until its call is given up; the others come at once.


async def answer_in_time(client: Client, stage: Stage, question: str, **more: Any) -> str | None:  # noqa: ANN401
    stage.hold(question)
    try:
        return await answer_to(client, question, timeout=10, **more)
    except openai.APITimeoutError:
        return None


async def return_after_a_timeout(client: Client, stage: Stage) -> float:
    """Nothing is asked after the call that was given up: what is paid is that it took too long."""
    answer = await answer_in_time(client, stage, "one")
    return -0.8 if answer is None else 0.5 * len(answer)


async def ask_something_else(client: Client, stage: Stage) -> float:
    first = await answer_in_time(client, stage, "one")
    size = 3 if first is None else len(first)
    return 0.4 * size - 0.1 * size * len(await answer_to(client, "two"))


async def try_twice(client: Client, stage: Stage) -> float:
    """The same request, as clients with retries send it; the second try may be late, too."""
    for number in range(2):
        answer = await answer_in_time(client, stage, "one")
        if answer is not None:
            return 1.0 - 0.6 * number + 0.2 * len(answer)
    return -1.5


async def try_by_options(client: Client, stage: Stage) -> float:
    stage.hold("one")
    late = 0
    for _ in range(2):
        try:
            return 0.3 * len(await answer_to(client.with_options(timeout=10), "one")) - late
        except TimeoutError:
            late += 1
    return -2.0


async def leave_a_slow_stream(client: Client, stage: Stage) -> float:
    stage.hold("one")
    read = ""
    try:
        async for chunk in await opened(client, "one", timeout=10):
            read += chunk.choices[0].delta.content or ""
    except openai.APITimeoutError:
        return -0.9 + 0.1 * len(read)
    return 0.3 * len(read)


async def give_both_a_time(client: Client, stage: Stage) -> float:
    """Two calls at once under one scope; either, both or none of them are cut."""
    found: dict[str, str] = {}

    async def ask(question: str) -> None:
        stage.hold(question)
        found[question] = await answer_to(client, question)

    with anyio.move_on_after(10):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask, "one")
            await anyio.wait_all_tasks_blocked()  # the policy chooses the answers in this order
            tasks.start_soon(ask, "two")
    return 0.5 * len(found.get("one", "")) - 0.7 * len(found.get("two", "")) * ("one" not in found)


PROGRAMS: list[Program] = [
    return_after_a_timeout,
    ask_something_else,
    try_twice,
    try_by_options,
    leave_a_slow_stream,
    give_both_a_time,
]


@pytest.mark.parametrize("program", PROGRAMS)
def test_what_a_timeout_cuts_teaches_the_policy_gradient(program: Program, renderer: Renderer) -> None:
    in_virtual_time(partial(check_gradient, program, renderer))


@pytest.mark.parametrize("program", PROGRAMS)
def test_an_episode_with_timeouts_replays_at_once(program: Program, renderer: Renderer) -> None:
    async def check() -> None:
        for each in await all_episodes(program, renderer):
            backend = ReplayBackend(each.trajectory)

            def run(task: Task, client: Client) -> Any:  # noqa: ANN401
                return program(client, Stage())

            again = await run_client_episode(workflow_of(run), TASK, Client(backend), timeout_s=PATIENCE_S)
            assert (again.failure, backend.diverged) == (None, [])
            assert again.final_reward == each.trajectory.final_reward
            assert [turn.stop_reason for turn in again.turns] == [turn.stop_reason for turn in each.trajectory.turns]

    in_virtual_time(check)


@pytest.mark.parametrize("sampled", [0, 1, 3])
@pytest.mark.parametrize("kind", ["whole", "stream", "ids"])
def test_a_timeout_that_is_caught_is_a_failure_only_where_nothing_was_sampled(
    renderer: Renderer, kind: str, sampled: int
) -> None:
    async def run(task: Task, client: Client) -> float:
        try:
            match kind:
                case "whole":
                    await answer_to(client, "one", timeout=10)
                case "stream":
                    async for _ in await opened(client, "one", timeout=10):
                        pass
                case _:
                    await client.generate(renderer.encode_content("one"), timeout=10)
        except CallTimeout:
            return -1.0
        return 1.0

    async def check() -> None:
        held = ScriptedReply(output="letters", holds=(Hold(at=sampled),))
        trajectory = await episode(workflow_of(run), renderer, script=lambda _: held)
        if sampled:
            assert (trajectory.failure, trajectory.final_reward) == (None, -1.0)
            [turn] = trajectory.turns
            assert (turn.stop_reason, len(turn.output_ids)) == (StopReason.ABORT, sampled)
        else:
            assert (trajectory.stop_reason, trajectory.turns) == (StopReason.SERVER_ERROR, ())

    in_virtual_time(check)
