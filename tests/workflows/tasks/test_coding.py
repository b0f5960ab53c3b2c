"""Coding tasks: sound by construction, without twins, the same each time, and sound for the real grader."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial
from random import Random

import pytest

from agentrl.errors import ConfigError, WorkflowError
from agentrl_rewards.code import CodeGrader, FunctionTests, read_tests
from agentrl_rewards.code.cases import best_constant
from agentrl_rewards.code.compare import value_matches
from agentrl_rewards.code.values import encode_value
from agentrl_sandbox.base import BoxSandbox
from agentrl_sandbox.types import Limits
from agentrl_workflows.coding import CODING_LEVELS, CodingTask, coding_tasks, level_1, make_coding_tasks
from agentrl_workflows.coding import tasks as tasks_module
from agentrl_workflows.coding.answers import compute_answers
from agentrl_workflows.coding.parts import Draft
from tests.support.solutions import run_solutions


@pytest.fixture(scope="module")
def some() -> list[CodingTask]:
    return make_coding_tasks(56, seed=3)


async def passed(sandbox: BoxSandbox, sources: list[tuple[CodingTask, str]]) -> list[float]:
    """Return the share of hidden tests that each source passes in the sandbox."""
    jobs = [(source, [call for call, _ in task.calls[1:]]) for task, source in sources]
    limits = Limits(wall_s=1800, cpu_s=1200, memory_mb=2048, output_kb=65_536)
    results = await run_solutions(sandbox, jobs, limits)
    shares: list[float] = []
    for (task, _), found in zip(sources, results, strict=True):
        tests = read_tests(task.as_task()["tests"])
        assert isinstance(tests, FunctionTests)
        expected = [encode_value(case.expected) for case in tests.cases]
        right = [value_matches(each, text, None) for each, text in zip(expected, found, strict=True)]
        shares.append(sum(right) / len(right))
    return shares


async def assert_sound(sandbox: BoxSandbox, tasks: list[CodingTask]) -> None:
    assert set(await passed(sandbox, [(task, task.draft.reference) for task in tasks])) == {1.0}
    wrong = [(task, source) for task in tasks for source in task.draft.wrong]
    assert max(await passed(sandbox, wrong)) < 1.0
    assert min(len(task.draft.wrong) for task in tasks) >= 3
    constants = [best_constant(read_tests(task.as_task()["tests"])) for task in tasks]
    assert max(found[1] for found in constants if found) < 1.0


@pytest.mark.starts
async def test_references_pass_and_wrong_solutions_and_constants_fail(sandbox: BoxSandbox, some: list[CodingTask]) -> None:
    assert Counter(task.level for task in some) == dict.fromkeys(CODING_LEVELS, 14)
    assert len({task.question for task in some}) == 56
    await assert_sound(sandbox, some)


@pytest.mark.starts
async def test_the_grader_agrees(sandbox: BoxSandbox, some: list[CodingTask]) -> None:
    made = next(task for task in some if task.level == 4)
    task, grader = made.as_task(), CodeGrader(sandbox)
    tests = read_tests(task["tests"])
    assert await grader(task["reference"], tests) == 1.0
    assert await grader("", tests) == 0.0
    assert await grader(f"```python\n{made.draft.wrong[0]}```", tests) == 0.0
    assert task["tests"]["calls"][0][0] not in task["question"]


@pytest.mark.starts
def test_the_same_arguments_give_the_same_tasks_and_the_splits_share_none() -> None:
    whole = coding_tasks(16, seed=5, levels=[1])
    train, held_out = (coding_tasks(16, seed=5, levels=[1], split=split) for split in ("train", "held_out"))  # pyright: ignore[reportArgumentType]
    made = make_coding_tasks(16, seed=5, levels=[1])
    assert [each.as_task() for each in made] == whole
    other = replace(made[0], answers=made[0].answers[::-1])
    assert other.as_task().id != whole[0].id
    assert len({task.id for task in whole}) == 16
    assert sorted(task.id for task in [*train, *held_out]) == sorted(task.id for task in whole)


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(ConfigError, match="expected the split train or held_out"):
        coding_tasks(8, split="test")  # pyright: ignore[reportArgumentType] - a run file's mistake
    with pytest.raises(ConfigError, match="expected levels of"):
        coding_tasks(8, levels=[5])


@pytest.mark.starts
def test_a_solution_that_loops_is_late_and_one_that_raises_has_an_error() -> None:
    sources = ("def f(x):\n    while x:\n        pass\n    return x", "def f(x):\n    return 1 // x")
    looping, raising = compute_answers([(source, "f", [(0,), (1,), (0,)]) for source in sources], cpu_s=0.5)
    assert looping == ["0", "!late", "!late"]
    assert raising == ["!ZeroDivisionError", "1", "!ZeroDivisionError"]


@pytest.mark.starts
def test_a_reference_that_is_late_is_an_error_and_no_task_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def endless(rng: Random) -> Draft:
        made = level_1.LEVEL_1_FAMILIES[0](rng)
        return replace(made, reference=f"def {made.name}(*arguments):\n    while True:\n        pass\n")

    monkeypatch.setattr(tasks_module, "FAMILIES", {1: (endless,)})
    monkeypatch.setattr(tasks_module, "compute_answers", partial(compute_answers, cpu_s=0.1))
    with pytest.raises(WorkflowError, match=r"expected the reference of .* to end in its CPU time"):
        make_coding_tasks(2, levels=[1])


@pytest.mark.starts
@pytest.mark.nightly
@pytest.mark.timeout(3600)
async def test_all_tasks_of_the_example_run_are_sound_and_no_two_behave_alike(sandbox: BoxSandbox) -> None:
    tasks = make_coding_tasks(2400, seed=0)
    assert len({task.question for task in tasks}) == 2400
    await assert_sound(sandbox, tasks)
