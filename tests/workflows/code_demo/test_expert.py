"""The demonstrator: wrong as often as its recipe says, and right about what its programs do."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import pytest

from agentrl.types import Message
from agentrl_rewards.code import CodeGrader, read_tests
from agentrl_sandbox import open_sandbox, open_warm_python
from agentrl_workflows.code_demo.expert import CodeDemonstrator, code_demonstrations, demonstrate_attempts
from agentrl_workflows.code_demo.recipe import CODE
from agentrl_workflows.code_demo.tasks import branching_tasks
from agentrl_workflows.code_feedback import describe_failed_example
from tests.support.sandboxes import usable_host

pytestmark = pytest.mark.starts

SKILLED = CodeDemonstrator(p_careless=0, p_repeat=0, p_slip=0)
TASKS = branching_tasks(count=2_000, seed=1)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def attempts_of(messages: Sequence[Message]) -> list[Any]:
    return [message["content"] for message in messages if message["role"] == "assistant"]


def solved_at(demonstrator: CodeDemonstrator) -> list[float]:
    """Return the share of tasks that are solved with at most 1, 2 and 3 attempts."""
    rng = random.Random(0)
    programs = [attempts_of(demonstrate_attempts(task, demonstrator, rng)) for task in TASKS]
    right = [
        each.index(task["reference"]) + 1 if task["reference"] in each else 9
        for task, each in zip(TASKS, programs, strict=True)
    ]
    return [sum(number <= limit for number in right) / len(right) for limit in (1, 2, 3)]


def test_what_a_description_leaves_open_takes_up_to_two_more_attempts_however_good_the_policy_is() -> None:
    assert solved_at(SKILLED) == pytest.approx([4 / 9, 8 / 9, 1.0], abs=0.03)


def test_its_most_likely_attempts_are_wrong() -> None:
    first, _, third = solved_at(CODE.demonstrator)
    assert first < 0.25
    assert third < 0.55
    rng = random.Random(0)
    careless = [attempts_of(demonstrate_attempts(task, CODE.demonstrator, rng)) for task in TASKS]
    repeated = [before == after for each in careless for before, after in pairwise(each)]
    assert sum(repeated) / len(repeated) > 0.6


def test_demonstrations_are_fixed_by_their_seed_and_of_training_tasks() -> None:
    def make(seed: int) -> list[Mapping[str, Any]]:
        return list(code_demonstrations(count=100, seed=seed, demonstrator=CODE.demonstrator))

    made = make(1)
    assert made == make(1) != make(2)
    held_out = {task["reference"] for task in branching_tasks(count=864, seed=0, split="held_out")}
    ends = {each["messages"][-1]["content"] for each in code_demonstrations(count=500, seed=0, demonstrator=SKILLED)}
    assert not ends & held_out
    assert all(each["messages"][-1]["role"] == "assistant" for each in made)


async def test_its_programs_get_the_feedback_that_the_demonstrations_have() -> None:
    usable_host()
    rng, checked = random.Random(5), 0
    async with open_sandbox() as pool, open_warm_python(pool) as warm:
        grader = CodeGrader(warm)
        for task in TASKS[:8]:
            messages = demonstrate_attempts(task, CODE.demonstrator, rng)
            for program, reply in zip(messages[1::2], messages[2::2], strict=False):
                examples = read_tests(task["examples"])
                grade = await grader.grade(str(program["content"]), examples)
                assert describe_failed_example(examples, grade) == reply["content"]
                checked += 1
            last = await grader.grade(str(messages[-1]["content"]), read_tests(task["tests"]))
            assert last.is_solved == (messages[-1]["content"] == task["reference"])
    assert checked > 4
