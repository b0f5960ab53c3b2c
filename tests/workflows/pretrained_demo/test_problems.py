"""The word problems: what they ask is what they answer, and held-out ones are others."""

from __future__ import annotations

import re

import pytest

from agentrl.errors import ConfigError
from agentrl.types import Task
from agentrl_workflows.pretrained_demo.problems import problems

SIGNS = {"more": 1, "another": 1, "gets": 1, "gives": -1, "loses": -1, "sells": -1}


def solve(question: str) -> int:
    """Return the answer by reading the question: another way than the one that made it."""
    total: int | None = None
    for sentence in question.split(". "):
        numbers = [int(number) for number in re.findall(r"\d+", sentence)]
        if not numbers:
            continue
        if "each" in sentence:
            total = numbers[0] * numbers[1]
            continue
        sign = next(SIGNS[word] for word in re.findall(r"\w+", sentence) if word in SIGNS)
        total = (numbers[0] if total is None else total) + sign * numbers[-1]
    assert total is not None
    return total


def pair(task: Task) -> tuple[int, ...]:
    return tuple(sorted(int(number) for number in re.findall(r"\d+", task["question"])[:2]))


def words(task: Task) -> set[str]:
    name = task["question"].split()[0]
    thing = re.search(r"How many (\w+) does", task["question"])
    assert thing is not None
    return {name, thing[1]}


@pytest.mark.parametrize("split", ["train", "held_out"])
def test_the_answer_is_that_of_the_question(split: str) -> None:
    tasks = problems(count=300, seed=3, split=split, operations=[1, 2])  # pyright: ignore[reportArgumentType]
    for task in tasks:
        assert solve(task["question"]) == task["answer"], task["question"]
        assert task["answer"] >= 0
        assert solve(". ".join(part["question"] for part in task["parts"])) == task["parts"][-1]["answer"] == task["answer"]
        assert solve(task["parts"][0]["question"]) == task["parts"][0]["answer"]
        assert len(task["parts"]) == task["operations"]
    assert [task["operations"] for task in tasks[:4]] == [1, 2, 1, 2]


def test_held_out_problems_share_no_name_no_thing_and_no_pair_of_numbers() -> None:
    train = [task for seed in (0, 1) for task in problems(count=1000, seed=seed, operations=[1, 2])]
    held_out = problems(count=300, seed=7, split="held_out", operations=[1, 2])
    assert not {pair(task) for task in train} & {pair(task) for task in held_out}
    assert not set().union(*map(words, train)) & set().union(*map(words, held_out))


def test_a_seed_gives_the_same_problems_and_another_one_others() -> None:
    assert problems(count=20, seed=1) == problems(count=20, seed=1)
    assert problems(count=20, seed=1) != problems(count=20, seed=2)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"count": 0}, "a count of 1 to 10000"),
        ({"count": 1, "operations": [3]}, "operations of 1 and 2"),
        ({"count": 1, "operations": []}, "operations of 1 and 2"),
        ({"count": 1, "split": "test"}, "a split of train or held_out, got 'test'"),
        ({"count": 10**6}, "a count of 1 to 10000"),
    ],
)
def test_what_cannot_be_made_is_refused(arguments: dict[str, object], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        problems(**arguments)  # pyright: ignore[reportArgumentType]
