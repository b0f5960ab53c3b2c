"""`client.branch()`: turns that a workflow declares independent, and what contradicts the declaration."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from agentrl import Client, Task, Trajectory, run_episode
from agentrl.client import ReplayBackend
from agentrl.episode.codec import pack_trajectory, unpack_trajectory
from agentrl.errors import WorkflowError
from agentrl.types import StopReason
from tests.support.chat import HI
from tests.support.endpoints import Endpoint, endpoint_client, serving

TASK = Task(id="t", data={})
WithClient = Callable[[Any], Any]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def in_training(use: WithClient) -> Trajectory:
    """Return the episode of `use` against a model."""

    async def solve(task: Task, client: Client) -> float:
        await use(client)
        return 1.0

    return await run_episode(solve, TASK, replies=["same answer"] * 9)


async def in_evaluation(use: WithClient) -> Trajectory:
    """Return the episode of `use` against an endpoint, whose answers are all the same."""
    endpoint = Endpoint()
    async with serving(endpoint.answer) as connection:
        client = endpoint_client(connection)
        await use(client)
        return client.close(StopReason.COMPLETED, 1.0)


BOTH = pytest.mark.parametrize("play", [in_training, in_evaluation])


async def say(client: Client, messages: list[Any]) -> Any:  # noqa: ANN401 - a completion
    return await client.chat.completions.create(messages=messages)


async def agents(client: Client) -> None:
    """Two agents in branches that ask the same and get the same, one of which opens branches of its own."""
    await say(client, [{"role": "user", "content": "plan"}])
    first, second = client.branch(), client.branch()
    inner = first.branch().as_player("white")
    for branch in (first, second, inner):
        answer = await say(branch, HI)
        messages = [*HI, answer.choices[0].message, {"role": "user", "content": "and now?"}]
        branch.reward(await say(branch, messages), 0.5)
    await say(client, [{"role": "user", "content": "join"}])


@BOTH
async def test_turns_have_the_branch_of_their_client_and_times_in_order(play: Callable[[WithClient], Any]) -> None:
    trajectory: Trajectory = await play(agents)
    assert trajectory.failure is None
    assert [turn.branch for turn in trajectory.turns] == [(), (0,), (0,), (1,), (1,), (0, 2), (0, 2), ()]
    assert [turn.player for turn in trajectory.turns] == [""] * 5 + ["white"] * 2 + [""]
    assert [turn.sent_at for turn in trajectory.turns] == [0, 1, 2, 4, 5, 7, 8, 10]
    assert [turn.rewarded_at for turn in trajectory.turns] == [None, None, 3, None, 6, None, 9, None]
    # Each agent continues its own first turn, although the first turns of all are the same.
    assert [turn.parent for turn in trajectory.turns][2:8:2] == [1, 3, 5]
    assert unpack_trajectory(pack_trajectory(trajectory), TASK).turns[6].branch == (0, 2)


async def test_a_replay_has_the_branches_of_the_workflow() -> None:
    recorded = await in_training(agents)
    again = ReplayBackend(recorded)
    await agents(client := Client(again))
    replayed = client.close(StopReason.COMPLETED, 1.0)
    assert again.diverged == []
    for name in ("branch", "sent_at", "rewarded_at", "reward"):
        assert [getattr(turn, name) for turn in replayed.turns] == [getattr(turn, name) for turn in recorded.turns]


async def reward_from_outside(client: Client) -> None:
    client.reward(await say(client.branch(), HI), 1.0)


async def reward_by_place(client: Client) -> None:
    await say(client.branch(), HI)
    client.turns[-1].reward(1.0)


async def reward_from_the_next_branch(client: Client) -> None:
    first, second = client.branch(), client.branch()
    second.reward(await say(first, HI), 1.0)


async def reward_from_above(client: Client) -> None:
    branch = client.branch()
    branch.reward(await say(branch.branch(), HI), 1.0)


@BOTH
@pytest.mark.parametrize(
    "use", [reward_from_outside, reward_by_place, reward_from_the_next_branch, reward_from_above], ids=lambda f: f.__name__
)
async def test_a_branch_that_is_rewarded_from_outside_is_an_error(
    play: Callable[[WithClient], Any], use: WithClient
) -> None:
    async def refused(client: Client) -> None:
        with pytest.raises(WorkflowError, match=r"turn 0 is of branch \[0.*reward it with the client that client.branch"):
            await use(client)

    await play(refused)


@BOTH
async def test_a_branch_may_reward_the_turns_that_it_came_from(play: Callable[[WithClient], Any]) -> None:
    async def use(client: Client) -> None:
        plan = await say(client, [{"role": "user", "content": "plan"}])
        branch = client.branch()
        await say(branch, HI)
        branch.reward(plan, 1.0)
        branch.turns[-1].reward(0.5)
        assert [turn.index for turn in branch.turns] == [1]
        assert len(client.turns) == 2

    trajectory: Trajectory = await play(use)
    assert [turn.reward for turn in trajectory.turns] == [1.0, 0.5]


@BOTH
async def test_a_branch_that_continues_a_turn_of_another_branch_is_an_error(play: Callable[[WithClient], Any]) -> None:
    async def use(client: Client) -> None:
        first, second = client.branch(), client.branch()
        answer = await say(first, HI)
        messages = [*HI, answer.choices[0].message, *HI]
        with pytest.raises(WorkflowError, match=r"a request of branch \[1\] continues turn 0 of branch \[0\]"):
            await say(second, messages)
        await say(client, messages)  # the client that opened both may join them
        await say(second, HI)

    trajectory: Trajectory = await play(use)
    assert trajectory.failure is None
    assert [(turn.branch, turn.parent) for turn in trajectory.turns] == [((0,), None), ((), 0), ((1,), None)]


async def test_token_level_calls_and_streams_know_their_branch() -> None:
    async def use(client: Client) -> None:
        first, second = client.branch(), client.branch()
        ids = client.tokenizer.encode("hello")
        one, two = await first.generate(ids), await second.generate(ids)
        assert one.output_ids.tolist() == two.output_ids.tolist()
        longer = [*ids, *one.output_ids.tolist(), *ids]
        await first.generate(longer)
        await second.generate(longer)  # continues its own turn, which is the same
        with pytest.raises(WorkflowError, match=r"branch \[2\] continues turn"):
            await client.branch().generate(longer)
        async with await first.chat.completions.create(messages=HI, stream=True) as stream:
            async for _ in stream:
                pass
        first.turns[-1].reward(1.0)

    trajectory = await in_training(use)
    assert [turn.branch for turn in trajectory.turns] == [(0,), (1,), (0,), (1,), (0,)]
    assert [turn.parent for turn in trajectory.turns] == [None, None, 0, 1, None]
