"""The demonstrator of the math demo: mostly wrong, insistent, fixed by its seed, and never on held-out sums."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from agentrl.types import Message, Task
from agentrl_workflows.math_demo.expert import Habits, demonstrate_answers, write_answers
from agentrl_workflows.math_demo.problems import is_held_out_sum, sum_problems
from agentrl_workflows.math_demo.recipe import MATH
from agentrl_workflows.math_feedback import FEEDBACK, extract_number


def conversations(habits: Habits, count: int = 2_000) -> list[tuple[Task, list[Message]]]:
    rng = random.Random(0)
    return [(task, demonstrate_answers(task, habits, rng)) for task in sum_problems(count=count, seed=2)]


def answers(messages: list[Message]) -> list[str | None]:
    return [extract_number(str(message["content"])) for message in messages if message["role"] == "assistant"]


def test_without_its_habits_it_is_right_at_once() -> None:
    skilled = Habits(p_half=0, p_slip=0, p_insist=0)
    assert all(answers(messages) == [task["answer"]] for task, messages in conversations(skilled, 300))


def test_its_most_likely_first_answer_leaves_out_the_last_change() -> None:
    half = [answers(messages)[0] == str(sum(task["terms"][:2])) for task, messages in conversations(MATH.habits)]
    assert sum(half) / len(half) == pytest.approx(MATH.habits.p_half, abs=0.04)


def test_after_the_feedback_it_mostly_repeats_its_answer() -> None:
    given = [answers(messages) for _, messages in conversations(MATH.habits)]
    repeated = [each[0] == each[1] for each in given if len(each) > 1]
    assert len(repeated) > 500
    assert sum(repeated) / len(repeated) > MATH.habits.p_insist


def test_a_conversation_alternates_ends_with_an_answer_and_has_at_most_three() -> None:
    for task, messages in conversations(MATH.habits, 300):
        roles = [message["role"] for message in messages]
        assert roles == ["user", "assistant"] * (len(roles) // 2)
        assert all(message["content"] == FEEDBACK for message in messages[2::2])
        assert task["answer"] not in answers(messages)[:-1]
        assert len(answers(messages)) <= 3


def test_demonstrations_are_fixed_by_their_seed_and_never_held_out(tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        write_answers(tmp_path / name, count=200, seed=seed, habits=MATH.habits)
    texts = {name: (tmp_path / name).read_text() for name in "abc"}
    assert texts["a"] == texts["b"] != texts["c"]
    asked = [json.loads(line)["messages"][0]["content"] for line in texts["a"].splitlines()]
    held = {task["question"] for task in sum_problems(count=200, seed=1) if is_held_out_sum(task["terms"])}
    assert len(asked) == 200
    assert not held
    assert asked == [task["question"] for task in sum_problems(count=200, seed=1)]
