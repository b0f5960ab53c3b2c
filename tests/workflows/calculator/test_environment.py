"""The rules of the calculator environment."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.types import Task
from agentrl_envs.calculator import (
    BAD_CALL,
    BUSY,
    WRONG,
    CalculatorEpisode,
    Split,
    apply,
    calculator_tasks,
    is_held_out,
)

TASK = Task(id="0", data={"question": "Compute 27 - (25 - 19).", "answer": "21", "steps": [], "seed": 5})


def call(arguments: object, name: str = "calc") -> dict[str, Any]:
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return {"id": "c", "type": "function", "function": {"name": name, "arguments": text}}


def content_of(episode: CalculatorEpisode, arguments: object, name: str = "calc") -> str:
    reply = episode.call(call(arguments, name))
    assert (reply["role"], reply["tool_call_id"]) == ("tool", "c")
    return str(reply["content"])


@pytest.mark.parametrize(("op", "value"), [("+", "44"), ("-", "6"), ("*", "475")])
def test_a_call_does_one_operation(op: str, value: str):
    assert content_of(CalculatorEpisode(TASK, p_busy=0), {"a": 25, "op": op, "b": 19}) == value


@pytest.mark.parametrize(
    "arguments",
    [
        "not json",
        "[1, 2]",
        "[" * 100_000,
        {"a": 1, "op": "+"},
        {"a": 1, "op": "/", "b": 2},
        {"a": 1, "op": ["+"], "b": 2},
        {"a": "1", "op": "+", "b": 2},
        {"a": True, "op": "+", "b": 2},
        {"a": 1.5, "op": "+", "b": 2},
        {"a": 10**9, "op": "*", "b": 10**9},
        {"a": 1, "op": "+", "b": 2, "c": 3},
    ],
)
def test_wrong_arguments_are_a_bad_call_and_never_a_fault(arguments: object):
    assert content_of(CalculatorEpisode(TASK, p_busy=0), arguments) == BAD_CALL


def test_another_tool_and_a_call_without_function_are_bad_calls():
    episode = CalculatorEpisode(TASK, p_busy=0)
    assert content_of(episode, {"a": 1, "op": "+", "b": 2}, name="search") == BAD_CALL
    assert episode.call({"id": "x", "type": "custom"})["content"] == BAD_CALL


def test_a_right_answer_pays_one_and_ends_the_episode():
    episode = CalculatorEpisode(TASK)
    assert episode.answer("The answer is 21.") is None
    assert (episode.reward, episode.correct) == (1.0, True)


def test_a_right_answer_after_a_wrong_one_pays_less():
    episode = CalculatorEpisode(TASK)
    assert episode.answer("The answer is 12.") == {"role": "user", "content": WRONG}
    assert episode.answer("The answer is 21.") is None
    assert (episode.reward, episode.num_wrong) == (0.7, 1)


def test_a_second_wrong_answer_ends_the_episode_with_nothing():
    episode = CalculatorEpisode(TASK)
    assert episode.answer("12") is not None
    assert episode.answer("13") is None
    assert (episode.reward, episode.correct) == (0.0, False)


def test_without_retry_the_first_wrong_answer_ends_the_episode():
    assert CalculatorEpisode(TASK, retry=False).answer("12") is None


@pytest.mark.parametrize("text", ["", "twenty-one", "21 or 22", "-21", "121", "9" * 10_000])
def test_an_answer_is_judged_by_its_last_integer(text: str):
    episode = CalculatorEpisode(TASK)
    episode.answer(text)
    assert not episode.correct


def test_an_unreadable_tool_call_is_told_so_and_is_no_answer():
    episode = CalculatorEpisode(TASK)
    assert episode.answer('<tool_call>\n{"name": "calc", "arguments": 21') == {"role": "user", "content": BAD_CALL}
    assert episode.num_wrong == 0


def test_busy_calls_follow_from_the_task_alone_and_come_at_the_given_rate():
    arguments = {"a": 1, "op": "+", "b": 1}
    tasks = calculator_tasks(count=500, seed=3)

    def replies() -> list[list[str]]:
        episodes = [CalculatorEpisode(task, p_busy=0.15) for task in tasks]
        return [[content_of(episode, arguments) for _ in range(4)] for episode in episodes]

    first, second = replies(), replies()
    assert first == second
    rate = sum(reply == BUSY for episode in first for reply in episode) / 2000
    assert 0.12 < rate < 0.18


def test_busy_calls_are_counted_and_a_bad_call_is_never_busy():
    episode = CalculatorEpisode(TASK, p_busy=1)
    assert content_of(episode, "{}") == BAD_CALL
    assert content_of(episode, {"a": 1, "op": "+", "b": 1}) == BUSY
    assert episode.num_busy == 1


@pytest.mark.parametrize("operations", [1, 2])
@pytest.mark.parametrize("split", ["train", "held_out"])
def test_tasks_are_right_and_stay_within_two_digits(operations: int, split: Split):
    for task in calculator_tasks(count=400, seed=1, split=split, operations=operations):
        expression = re.fullmatch(r"Compute ([0-9 +*()-]+)\.", task["question"])
        assert expression
        numbers = [int(number) for number in re.findall(r"\d+", expression[1])]
        assert len(numbers) == operations + 1
        assert all(1 <= number <= 99 for number in numbers)
        result = 0
        for a, op, b in task["steps"]:
            result = apply(result if a is None else a, op, result if b is None else b)
            assert 0 <= result <= 99
        assert str(result) == task["answer"]
        assert str(_value(expression[1])) == task["answer"]


def _value(expression: str) -> int:
    while inner := re.search(r"\(([^()]+)\)", expression):
        expression = expression.replace(inner[0], str(_value(inner[1])))
    a, op, b = expression.split(" ")
    return {"+": int(a) + int(b), "-": int(a) - int(b), "*": int(a) * int(b)}[op]


@given(st.integers(0, 10_000), st.integers(0, 10_000))
def test_training_and_held_out_tasks_share_no_question(seed: int, other: int):
    train = {task["question"] for task in calculator_tasks(count=40, seed=seed, split="train")}
    held_out = {task["question"] for task in calculator_tasks(count=10, seed=other, split="held_out")}
    assert not train & held_out
    assert not any(map(is_held_out, train))
    assert all(map(is_held_out, held_out))


def twins(question: str) -> set[str]:
    """Return the question with the operands of its sums and products in every order, but for its own."""
    expression = re.fullmatch(r"Compute (.+)\.", question)
    assert expression
    return {f"Compute {each}." for each in _orders(expression[1])} - {question}


def _orders(expression: str) -> set[str]:
    outer = re.fullmatch(r"(\d+|\(.+\)) ([-+*]) (\d+|\(.+\))", expression)
    if outer is None:
        return {expression}
    first, op, second = outer.groups()
    both = [{f"({inner})" for inner in _orders(term[1:-1])} if "(" in term else {term} for term in (first, second)]
    pairs = [(a, b) for a in both[0] for b in both[1]]
    return {f"{a} {op} {b}" for a, b in pairs} | {f"{b} {op} {a}" for a, b in pairs if op != "-"}


def test_a_held_out_question_has_no_twin_in_training_that_differs_in_the_order_of_operands():
    assert twins("Compute 2 * (3 + 5).") == {"Compute 2 * (5 + 3).", "Compute (3 + 5) * 2.", "Compute (5 + 3) * 2."}
    held_out = [task["question"] for task in calculator_tasks(count=512, seed=0, split="held_out")]
    train = {task["question"] for task in calculator_tasks(count=20_000, seed=0)}
    changed = {twin for question in held_out for twin in twins(question)}
    assert len(changed) > 512
    assert not changed & train
    assert all(map(is_held_out, changed))


def test_tasks_are_fixed_by_their_seed_and_different_within_a_set():
    assert calculator_tasks(count=300, seed=4) == calculator_tasks(count=300, seed=4)
    assert calculator_tasks(count=300, seed=4) != calculator_tasks(count=300, seed=5)
    questions = [task["question"] for task in calculator_tasks(count=20_000, seed=0)]
    assert len(set(questions)) == 20_000


def test_more_tasks_than_there_are_questions_is_an_error():
    with pytest.raises(ValueError, match="ask for fewer"):
        calculator_tasks(count=20_000, seed=0, split="held_out", operations=1)
    with pytest.raises(ValueError, match="1 or 2"):
        calculator_tasks(count=1, seed=0, operations=3)
