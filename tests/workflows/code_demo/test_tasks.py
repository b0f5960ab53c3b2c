"""The functions to write: what a description says, what it leaves open, and that nothing held out is in training."""

from __future__ import annotations

from collections import Counter

import pytest

from agentrl.errors import ConfigError
from agentrl.types import Task
from agentrl_workflows.code_demo.tasks import (
    EXAMPLE_ARGUMENTS,
    NUMBERS,
    OPEN,
    OPERATIONS,
    Branching,
    branching_tasks,
    operate,
)

TRAIN, HELD_OUT = branching_tasks(count=6_048, seed=0), branching_tasks(count=864, seed=0, split="held_out")


def test_training_and_held_out_tasks_share_no_function_whatever_their_seeds() -> None:
    other = branching_tasks(count=864, seed=7, split="held_out")
    assert {task["reference"] for task in TRAIN}.isdisjoint(task["reference"] for task in [*HELD_OUT, *other])
    assert len({task["question"] for task in TRAIN} | {task["question"] for task in HELD_OUT}) < len(TRAIN + HELD_OUT)
    assert len({(task["reference"], *task["stated"]) for task in TRAIN + HELD_OUT}) == len(TRAIN) + len(HELD_OUT)


def test_the_same_seed_gives_the_same_tasks_and_too_many_are_refused() -> None:
    assert branching_tasks(count=20, seed=3) == branching_tasks(count=20, seed=3) != branching_tasks(count=20, seed=4)
    with pytest.raises(ConfigError, match="there are 864 held_out tasks, got count 865"):
        branching_tasks(count=865, seed=0, split="held_out")


def test_each_description_leaves_no_one_or_two_operations_open() -> None:
    assert {tuple(task["stated"]) for task in TRAIN} == {(True, True), (True, False), (False, True), (False, False)}
    for task in TRAIN[:200]:
        assert task["question"].count(OPEN) == task["stated"].count(False)
        assert Counter(task["stated"])[True] == sum(task["question"].count(words) for words in OPERATIONS.values())


def test_the_two_examples_concern_one_branch_each_and_tell_the_operations_apart() -> None:
    for argument in EXAMPLE_ARGUMENTS:
        for number in NUMBERS:
            assert len({operate(operation, argument, number) for operation in OPERATIONS}) == 3
    values = {
        argument: {operation: {operate(operation, argument, n) for n in NUMBERS} for operation in OPERATIONS}
        for argument in EXAMPLE_ARGUMENTS
    }
    for by_operation in values.values():
        assert sum(map(len, by_operation.values())) == len(set().union(*by_operation.values()))


def test_hidden_tests_are_of_both_branches_and_not_in_what_the_policy_reads() -> None:
    for task in HELD_OUT[:200]:
        calls = [call for call, _ in task["tests"]["calls"]]
        assert not {call for call, _ in task["examples"]["calls"]} & set(calls)
        assert _branches(task) == {0, 1}


def _branches(task: Task) -> set[int]:
    function = Branching(condition=task["condition"], operations=task["operations"], numbers=task["numbers"])
    return {function.branch(int(call[2:-1])) for call, _ in task["tests"]["calls"]}
