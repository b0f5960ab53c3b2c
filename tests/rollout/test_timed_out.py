"""A timeout of the agent's own cuts a call, and what the call had sampled teaches exactly the policy gradient."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from agentrl.client import CallTimeout, Client, ReplayBackend
from agentrl.rollout.episode import run_client_episode
from agentrl.servers.scripted.script import Hold, ScriptedReply
from agentrl.tokens.renderer import Renderer
from agentrl.types import StopReason, Task
from tests.rollout.harness import PATIENCE_S, TASK, episode, workflow_of
from tests.rollout.impatient_agents import (
    ask_something_else,
    give_both_a_time,
    leave_a_slow_stream,
    return_after_a_timeout,
    try_by_options,
    try_twice,
)
from tests.rollout.letters import Program, Stage, all_episodes, answer_to, check_gradient, opened
from tests.support.scripted import in_virtual_time

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
