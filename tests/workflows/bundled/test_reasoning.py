"""Single-turn reasoning: what pays, what does not, and what a broken grader is."""

from __future__ import annotations

import pytest

from agentrl.tokens.verify import verify
from agentrl.types import StopReason, Task
from agentrl_workflows.reasoning import Reasoning
from tests.support.player import Player

HALF = Task(id="half", data={"question": "What is 1 - 1/2?", "answer": "0.5"})


@pytest.mark.starts
async def test_an_equivalent_answer_pays_and_exactly_one_box_pays_a_little(play: Player) -> None:
    rewards = {
        r"It is \boxed{\frac{1}{2}}.": 1.1,
        "It is 1/2.": 1.0,
        r"It is \boxed{2}.": 0.1,
        r"\boxed{1} or \boxed{0.5}": 0.0,  # alternatives
        "No idea.": 0.0,
    }
    episodes = await play.all(Reasoning(num_workers=1), HALF, *([text] for text in rewards))
    assert [episode.final_reward for episode in episodes] == pytest.approx(list(rewards.values()))
    assert [episode.metrics["correct"] for episode in episodes] == [1.0, 1.0, 0.0, 0.0, 0.0]
    assert all(episode.failure is None for episode in episodes)
    for episode in episodes:
        verify(episode)


async def test_numbers_and_texts_are_compared_without_workers(play: Player) -> None:
    number = await play(Reasoning(compare="number", format_weight=0.0), HALF, r"So \boxed{.50}.")
    text = await play(Reasoning(compare="text"), Task(id="a", data={"question": "?", "answer": "Blue"}), r"\boxed{blue.}")
    assert (number.final_reward, text.final_reward) == (1.0, 1.1)


async def test_a_response_that_the_token_limit_cut_is_wrong_and_recorded(play: Player) -> None:
    text = r"\boxed{0.5} and then a long explanation follows"
    [episode] = await play.all(Reasoning(compare="number"), HALF, [text], max_tokens=20)
    assert (episode.final_reward, episode.metrics["truncated"]) == (0.0, 1.0)


async def test_a_task_without_a_reference_is_an_environment_fault_and_no_reward(play: Player) -> None:
    episode = await play(Reasoning(), Task(id="e", data={"question": "?", "answer": ""}), r"\boxed{1}")
    assert (episode.stop_reason, episode.final_reward) == (StopReason.ENVIRONMENT_FAULT, None)
