"""Math with feedback: what each attempt pays, what the model reads between two, and what is recorded."""

from __future__ import annotations

from typing import Any

import pytest

from agentrl.errors import ConfigError
from agentrl.tokens.verify import verify
from agentrl.types import StopReason, Task
from agentrl_workflows.math_feedback import FEEDBACK, INSTRUCTION, MathFeedback
from tests.support.player import Player

HALF = Task(id="half", data={"question": "What is 1 - 1/2?", "answer": "0.5"})
WRONG, RIGHT = r"It is \boxed{2}.", r"It is \boxed{\frac{1}{2}}."


@pytest.mark.starts
async def test_a_right_answer_pays_less_at_each_further_attempt(play: Player) -> None:
    scripts = [[RIGHT], [WRONG, RIGHT], [WRONG, r"\boxed{3}", RIGHT], [WRONG, WRONG, "No idea."]]
    episodes = await play.all(MathFeedback(discount=0.5, num_workers=1), HALF, *scripts)
    assert [episode.final_reward for episode in episodes] == [1.0, 0.5, 0.25, 0.0]
    assert [episode.metrics["attempts"] for episode in episodes] == [1.0, 2.0, 3.0, 3.0]
    assert [episode.metrics["correct"] for episode in episodes] == [1.0, 1.0, 1.0, 0.0]
    assert [episode.metrics["repeated"] for episode in episodes] == [0.0, 0.0, 0.0, 1.0]
    assert all(episode.failure is None for episode in episodes)
    for episode in episodes:
        verify(episode)


async def test_the_model_reads_the_instruction_once_and_the_feedback_after_each_wrong_answer(play: Player) -> None:
    episode = await play(MathFeedback(compare="number"), HALF, "It is 2.", "It is 3.", "It is 0.5.")
    first, *later = play.read(episode)
    assert first.index(HALF["question"]) < first.index(INSTRUCTION)
    assert all(FEEDBACK in text and INSTRUCTION not in text for text in later)
    assert len(later) == 2


async def test_the_attempts_are_limited(play: Player) -> None:
    episode = await play(MathFeedback(compare="number", max_attempts=1), HALF, "It is 2.")
    assert (len(episode.turns), episode.final_reward, episode.metrics["attempts"]) == (1, 0.0, 1.0)


async def test_a_response_that_the_token_limit_cut_is_wrong(play: Player) -> None:
    text = "It is 0.5 or something else, which takes a long time to say"
    [episode] = await play.all(MathFeedback(compare="number", max_attempts=1), HALF, [text], max_tokens=20)
    assert (episode.final_reward, episode.metrics["correct"]) == (0.0, 0.0)


async def test_a_task_without_a_reference_is_an_environment_fault_and_no_reward(play: Player) -> None:
    episode = await play(MathFeedback(num_workers=1), Task(id="e", data={"question": "?", "answer": ""}), RIGHT)
    assert (episode.stop_reason, episode.final_reward) == (StopReason.ENVIRONMENT_FAULT, None)


@pytest.mark.parametrize("args", [{"max_attempts": 0}, {"discount": 0.0}, {"discount": 1.5}, {"compare": "text"}])
def test_arguments_out_of_bounds_are_refused(args: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="MathFeedback: max_attempts must be"):
        MathFeedback(**args)
