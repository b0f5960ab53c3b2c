"""Every programming task: its reference is right, no solution and three wrong ones are not."""

from __future__ import annotations

from collections import Counter

import pytest

from agentrl.errors import ConfigError
from agentrl_rewards.code import call_tests
from agentrl_rewards.code.compare import value_matches
from agentrl_rewards.code.values import encode_value
from agentrl_sandbox.base import BoxSandbox
from agentrl_sandbox.types import Limits
from agentrl_workflows.programming import PROGRAMMING_LEVELS, ProgrammingTask, load_programming_tasks, programming_tasks
from tests.support.solutions import run_solutions

ALL = [(level, task) for level in PROGRAMMING_LEVELS for task in load_programming_tasks(level)]


def test_there_are_twenty_tasks_at_each_level_and_none_twice() -> None:
    assert Counter(level for level, _ in ALL) == dict.fromkeys(PROGRAMMING_LEVELS, 20)
    assert len({task.name for _, task in ALL}) == len({task.statement for _, task in ALL}) == 80
    with pytest.raises(ConfigError, match="expected a level"):
        load_programming_tasks(5)


def test_every_task_has_hidden_tests_and_three_wrong_solutions() -> None:
    for _, task in ALL:
        values = [value for _, value in task.tests[1:]]
        assert len(values) >= 5, task.name
        assert len(set(values)) > 1, task.name
        assert "None" not in values, task.name
        assert len({call for call, _ in task.tests}) == len(task.tests), task.name
        assert len({*task.wrong_solutions(), task.reference}) == 4, task.name


def test_training_and_held_out_tasks_are_all_tasks_and_share_none() -> None:
    train, held_out = programming_tasks(split="train"), programming_tasks(split="held_out")
    assert Counter(task["level"] for task in train) == dict.fromkeys(PROGRAMMING_LEVELS, 16)
    assert Counter(task["level"] for task in held_out) == dict.fromkeys(PROGRAMMING_LEVELS, 4)
    assert sorted(task.id for task in [*train, *held_out]) == sorted(task.id for task in programming_tasks())
    assert not {task["question"] for task in train} & {task["question"] for task in held_out}
    with pytest.raises(ConfigError, match="expected the split train or held_out, got 'test'"):
        programming_tasks(split="test")  # pyright: ignore[reportArgumentType] - a run file's mistake


def test_a_policy_sees_the_example_and_no_hidden_test() -> None:
    for task in programming_tasks():
        hidden = [call for call, _ in task["tests"]["calls"]]
        assert not [call for call in hidden if call in task["question"]]
        assert task["question"].count("Example:") == 1


@pytest.mark.starts
async def test_the_reference_passes_all_tests_and_wrong_solutions_fail_a_hidden_one(sandbox: BoxSandbox) -> None:
    sources = [(task, source) for _, task in ALL for source in (task.reference, *task.wrong_solutions())]
    jobs = [(source, [call for call, _ in task.tests]) for task, source in sources]
    results = await run_solutions(sandbox, jobs, Limits(wall_s=300, cpu_s=200))
    shares = [_passed(task, found) for (task, _), found in zip(sources, results, strict=True)]
    for at, (_, task) in enumerate(ALL):
        (reference, example), *wrong = shares[4 * at : 4 * at + 4]
        assert (reference, example) == (1.0, True), task.name
        assert all(share < 1.0 for share, _ in wrong), (task.name, wrong)


def _passed(task: ProgrammingTask, found: list[str]) -> tuple[float, bool]:
    """Return the share of hidden tests that pass, and whether the example of the question does."""
    cases = call_tests(task.tests).cases
    passed = [value_matches(encode_value(case.expected), text, None) for case, text in zip(cases, found, strict=True)]
    return sum(passed[1:]) / len(passed[1:]), passed[0]
