"""The agent that calculates by text, and its control."""

from __future__ import annotations

from dataclasses import replace

import pytest

from agentrl.types import StopReason, Task
from agentrl_testing import play, play_async
from agentrl_workflows.pretrained_demo.workflow import (
    CONTINUED,
    EXAMPLES,
    UNCLEAR,
    ContinuedCalculator,
    ShuffledRewards,
    WrittenCalculator,
    answer_call,
)

TASK = {"question": "Ben has 35 marbles and finds 27 more. How many marbles does Ben have now?", "answer": 62}


def test_a_calculation_is_answered_and_the_right_answer_pays() -> None:
    episode = play(WrittenCalculator, TASK, ["CALC(35 + 27)", "ANSWER: 62"])
    assert episode.final_reward == 1.0
    assert episode.metrics == {"success": 1.0, "calls": 1.0, "unclear": 0.0}
    assert len(episode.turns) == 2


@pytest.mark.parametrize("answer", ["ANSWER: 62", "It has ANSWER: 62.", "ANSWER: 62\n"])
def test_the_answer_stands_at_the_end_of_a_turn(answer: str) -> None:
    assert play(WrittenCalculator, TASK, [answer]).final_reward == 1.0


@pytest.mark.parametrize("answer", ["ANSWER: 63", "ANSWER: -62", "ANSWER: 620"])
def test_a_wrong_answer_pays_nothing(answer: str) -> None:
    assert play(WrittenCalculator, TASK, [answer]).final_reward == 0.0


def test_a_turn_without_either_is_asked_again_until_the_limit() -> None:
    seen: list[str] = []

    def reply(messages: object) -> str:
        seen.append(str(messages[-1]["content"]))  # pyright: ignore[reportIndexIssue, reportUnknownArgumentType]
        return "CALC(35 pears)"

    episode = play(WrittenCalculator, TASK, reply)  # pyright: ignore[reportArgumentType]
    assert seen == [TASK["question"], UNCLEAR, UNCLEAR, UNCLEAR]
    assert (episode.final_reward, episode.metrics["unclear"], episode.stop_reason) == (0.0, 4.0, StopReason.COMPLETED)


def test_a_result_that_the_model_makes_up_is_not_its_answer() -> None:
    episode = play(WrittenCalculator, TASK, ["ANSWER: 62\nCALC(1 + 2)", "ANSWER: 3"])
    assert episode.final_reward == 0.0


def test_calculations_are_read_with_and_without_spaces() -> None:
    assert [answer_call(text) for text in ("CALC(6*7)", "so CALC(9 - 12) and", "CALC(1 / 2)", "CALC(a + b)")] == [
        "RESULT: 42",
        "RESULT: -3",
        None,
        None,
    ]


def test_the_examples_show_no_multiplication_and_are_played_as_the_agent_plays() -> None:
    shown = (*EXAMPLES, *CONTINUED)
    text = [str(message["content"]) for message in shown]  # pyright: ignore[reportIndexIssue, reportCallIssue, reportArgumentType]
    assert not any("*" in each for each in text)
    for call, result in zip(text[1::4], text[2::4], strict=True):
        assert answer_call(call) == result


LONGER = {
    "question": "Ben has 35 marbles and finds 27 more. Then Ben sells 2 of them. How many marbles does Ben have now?",
    "answer": 60,
    "parts": [
        {"question": "Ben has 35 marbles and finds 27 more. How many marbles does Ben have now?", "answer": 62},
        {"question": "Then Ben sells 2 of them. How many marbles does Ben have now?", "answer": 60},
    ],
}


@pytest.mark.parametrize(
    ("replies", "reward", "success"),
    [
        (["CALC(35 + 27)", "ANSWER: 62", "CALC(62 - 2)", "ANSWER: 60"], 1.0, 1.0),
        (["ANSWER: 62", "ANSWER: 64"], 0.5, 0.0),
        (["ANSWER: 60"], 0.0, 0.0),
    ],
)
def test_a_problem_in_parts_pays_for_each_right_answer_until_a_wrong_one(
    replies: list[str], reward: float, success: float
) -> None:
    episode = play(ContinuedCalculator, LONGER, replies)
    assert (episode.final_reward, episode.metrics["success"]) == (reward, success)


async def test_the_control_gives_the_members_of_a_group_each_others_rewards() -> None:
    right, wrong = [await play_async(WrittenCalculator, TASK, [f"ANSWER: {number}"]) for number in (62, 3)]
    episodes = [replace(each, episode_id=f"e{number}") for number, each in enumerate([right, right, wrong, wrong] * 2)]
    given = [episode.final_reward for episode in episodes]
    orders: set[tuple[float, ...]] = set()
    for number in range(20):
        task = Task(id=f"t{number}", data=TASK)
        shuffled = await ShuffledRewards().score_group(task, episodes)
        assert sorted(shuffled) == sorted(given)  # pyright: ignore[reportArgumentType]
        assert list(shuffled) == list(await ShuffledRewards().score_group(task, episodes))
        orders.add(tuple(shuffled))
    assert len(orders) > 10
