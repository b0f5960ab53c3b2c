"""`client.turns`, `client.reward_final` and `client.tokenizer`: what a workflow has at hand beside its calls."""

from __future__ import annotations

import numpy as np
import pytest

from agentrl import Client, RolloutWorkflow, Task, Trajectory, run_episode
from agentrl.episode.codec import stored_trajectory
from agentrl.episode.show import view_of
from agentrl.errors import ConfigError
from agentrl.types import StopReason
from agentrl.workflow import as_workflow
from agentrl_testing.replays import timeless_record

TASK = Task(id="t", data={"question": "hello"})
QUESTION = [{"role": "user", "content": "hello"}]


async def play(workflow: object, *replies: str) -> Trajectory:
    return await run_episode(workflow, TASK, replies=replies or ("one", "two", "three"))


async def test_a_turn_is_rewarded_by_its_place() -> None:
    async def solve(task: Task, client: Client) -> float:
        assert len(client.turns) == 0
        await client.chat.completions.create(messages=QUESTION)
        client.turns[-1].reward(0.5)
        await client.chat.completions.create(messages=QUESTION)
        assert [turn.index for turn in client.turns] == [0, 1]
        assert [turn.message["content"] for turn in client.turns[:1]] == ["one"]
        assert client.turns[0].given_reward == 0.5
        client.turns[1].reward(True)
        return 1.0

    assert [turn.reward for turn in (await play(solve)).turns] == [0.5, 1.0]


@pytest.mark.parametrize(("index", "message"), [(0, "already has the reward 0.5"), (7, "has 1 turns so far, asked for 7")])
async def test_a_turn_is_rewarded_once_and_must_exist(index: int, message: str) -> None:
    async def solve(task: Task, client: Client) -> float:
        completion = await client.chat.completions.create(messages=QUESTION)
        client.reward(completion, 0.5)
        client.turns[index].reward(0.5)
        return 1.0

    failure = (await play(solve)).failure
    assert failure is not None
    assert message in failure.message


async def test_a_player_sees_the_turns_of_its_own() -> None:
    async def solve(task: Task, client: Client) -> float:
        white, black = client.as_player("white"), client.as_player("black")
        for speaker in (white, black, white):
            await speaker.chat.completions.create(messages=QUESTION)
        assert [turn.index for turn in white.turns] == [0, 2]
        assert [turn.index for turn in black.turns] == [1]
        assert len(client.turns) == 3
        return 0.0

    assert (await play(solve)).failure is None


async def test_a_role_labels_its_turns_and_shares_the_return() -> None:
    async def solve(task: Task, client: Client) -> float:
        critic = client.role("critic")
        await client.chat.completions.create(messages=QUESTION)
        await critic.chat.completions.create(messages=QUESTION)
        stream = await critic.chat.completions.create(messages=QUESTION, stream=True)
        async for _ in stream:
            pass
        assert [turn.index for turn in critic.turns] == [1, 2]
        assert [turn.index for turn in critic.as_player("white").turns] == []
        assert len(client.turns) == 3
        return 1.0

    trajectory = await play(solve)
    assert [turn.role for turn in trajectory.turns] == ["", "critic", "critic"]
    assert [turn.player for turn in trajectory.turns] == [""] * 3
    assert trajectory.player_returns() == {"": 1.0}


@pytest.mark.parametrize("name", ["", 3])
async def test_a_role_needs_a_name(name: object) -> None:
    async def solve(task: Task, client: Client) -> float:
        client.role(name)  # pyright: ignore[reportArgumentType]
        return 1.0

    failure = (await play(solve)).failure
    assert failure is not None
    assert "client.role takes the name of a role" in failure.message


async def test_a_final_reward_set_on_the_way_needs_no_return() -> None:
    async def solve(task: Task, client: Client) -> None:
        await client.chat.completions.create(messages=QUESTION)
        client.reward_final(0.75)

    assert (await play(solve)).final_reward == 0.75


@pytest.mark.parametrize(
    ("values", "returned", "message"),
    [
        ([0.75], 0.75, "the final reward is already 0.75, got 0.75; set it once"),
        ([0.75, 0.5], None, "the final reward is already 0.75, got 0.5"),
        ([float("nan")], None, "client.reward_final, episode"),
        ([], None, "got NoneType None; return a float from run(), or call client.reward_final(value)"),
    ],
)
async def test_a_final_reward_is_given_once(values: list[float], returned: float | None, message: str) -> None:
    async def solve(task: Task, client: Client) -> float | None:
        await client.chat.completions.create(messages=QUESTION)
        for value in values:
            client.reward_final(value)
        return returned

    trajectory = await play(solve)
    assert (trajectory.final_reward, trajectory.stop_reason) == (None, StopReason.WORKFLOW_ERROR)
    assert trajectory.failure is not None
    assert message in trajectory.failure.message


async def test_a_workflow_that_fails_has_no_final_reward_even_if_it_has_set_one() -> None:
    async def solve(task: Task, client: Client) -> None:
        await client.chat.completions.create(messages=QUESTION)
        client.reward_final(1.0)
        raise KeyError("lost")

    assert (await play(solve)).final_reward is None


class TokenLevel(RolloutWorkflow):
    """Works on token ids and has no `run`."""

    async def rollout(self, task: Task, client: Client) -> Trajectory:
        prompt = client.tokenizer.encode("<|im_end|> is text")
        generation = await client.generate(prompt, max_tokens=64)
        client.record(prompt_tokens=len(prompt), answered=client.tokenizer.decode(generation.output_ids) != "")
        client.reward_final(0.5)
        return client.close(StopReason.COMPLETED)


async def test_a_token_level_workflow_needs_no_run_and_encodes_control_tokens_as_text() -> None:
    trajectory = await play(TokenLevel)
    assert trajectory.failure is None
    assert trajectory.final_reward == 0.5
    assert trajectory.turns[0].context_ids.dtype == np.int32
    assert trajectory.metrics["prompt_tokens"] == len(trajectory.turns[0].context_ids) > 3
    assert trajectory.metrics["answered"] == 1


def test_a_workflow_with_neither_run_nor_rollout_is_refused_before_anything_starts() -> None:
    class Neither(RolloutWorkflow):
        pass

    with pytest.raises(ConfigError, match="Neither is an abstract workflow: it does not implement run, or rollout for"):
        as_workflow(Neither)
    with pytest.raises(ConfigError, match="Neither is an abstract workflow"):
        as_workflow(Neither())


async def test_rewards_in_parts_add_up_and_are_recorded_by_name() -> None:
    async def solve(task: Task, client: Client) -> None:
        completion = await client.chat.completions.create(messages=QUESTION)
        client.reward(completion, {"format": 0.25, "length": -0.5})
        await client.chat.completions.create(messages=QUESTION)
        client.turns[-1].reward({"format": True})
        client.reward_final({"right": 2.0, "length": -0.25})

    trajectory = await play(solve)
    assert [turn.reward for turn in trajectory.turns] == [-0.25, 1.0]
    assert trajectory.final_reward == 1.75
    assert trajectory.reward_parts == {"format": 1.25, "length": -0.75, "right": 2.0}
    assert trajectory.turn_reward_parts == {"format": 1.25, "length": -0.5}
    assert sum(trajectory.reward_parts.values()) == trajectory.episode_return
    again = stored_trajectory(timeless_record(trajectory))
    assert (again.reward_parts, again.answer) == (trajectory.reward_parts, None)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({}, "parts of a reward need names and numbers"),
        ({1: 1.0}, "parts of a reward need names and numbers"),
        ({"right": "1"}, "part right: a reward must be a finite number, got str"),
        ({"a": 1e30, "b": 1e30}, "a reward must be a finite number"),
    ],
)
async def test_parts_that_are_no_numbers_are_refused_and_leave_no_part(parts: dict[str, float], message: str) -> None:
    async def solve(task: Task, client: Client) -> float:
        await client.chat.completions.create(messages=QUESTION)
        client.reward_final(parts)
        return 1.0

    trajectory = await play(solve)
    assert trajectory.failure is not None
    assert message in trajectory.failure.message
    assert trajectory.reward_parts == {}


async def test_the_last_answer_that_a_workflow_names_is_the_one_of_the_episode() -> None:
    async def solve(task: Task, client: Client) -> float:
        await client.chat.completions.create(messages=QUESTION)
        client.final_answer("first")
        client.final_answer(42)
        return 1.0

    trajectory = await play(solve)
    assert trajectory.answer == "42"
    assert stored_trajectory(timeless_record(trajectory)).answer == "42"
    assert "answer 42" in view_of(trajectory).facts


async def test_an_answer_that_is_no_text_is_refused() -> None:
    async def solve(task: Task, client: Client) -> float:
        await client.chat.completions.create(messages=QUESTION)
        client.final_answer(["4"])  # pyright: ignore[reportArgumentType]
        return 1.0

    failure = (await play(solve)).failure
    assert failure is not None
    assert "client.final_answer, episode" in failure.message
