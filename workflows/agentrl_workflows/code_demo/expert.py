"""The scripted demonstrator of the warm start: it can read descriptions and examples, but mostly does not.

Invariant: a demonstration is a conversation as the workflow has it, with the feedback that the program gets
(`tests/workflows/code_demo/test_expert.py` compares it with the sandbox's). Demonstrations use training tasks only.

The demonstrator's most likely first attempt adds in both branches, whatever the description says, and its most likely next
attempt is the same program once more. A student that imitates it and samples greedily solves one task in nine; only the
reward teaches it to read.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

from agentrl.types import Message, Task
from agentrl_workflows.code_demo.tasks import EXAMPLE_ARGUMENTS, OPERATIONS, Branching, branching_tasks


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeDemonstrator:
    """How the scripted demonstrator errs; each number is a probability."""

    p_careless: float
    """Its first attempt adds in both branches."""
    p_repeat: float
    """A later attempt is the same program as the one before."""
    p_slip: float = 0.02
    """Another operation stands in a branch."""


def demonstrate_attempts(
    task: Task, demonstrator: CodeDemonstrator, rng: random.Random, *, max_attempts: int = 3
) -> list[Message]:
    """Return the conversation of one demonstrated episode; it ends with an attempt."""
    target = Branching(
        condition=str(task["condition"]),
        operations=cast("tuple[str, str]", tuple(task["operations"])),
        numbers=cast("tuple[int, int]", tuple(task["numbers"])),
    )
    messages: list[Message] = [{"role": "user", "content": task["question"]}]
    attempt = _first_attempt(target, task["stated"], demonstrator, rng)
    for number in range(1, max_attempts + 1):
        messages.append({"role": "assistant", "content": f"```python\n{attempt.source}```"})
        failed = next((x for x in EXAMPLE_ARGUMENTS if attempt.value(x) != target.value(x)), None)
        if failed is None or number == max_attempts:
            break
        said = f"f({failed}) returned {attempt.value(failed)}, expected {target.value(failed)}."
        messages.append({"role": "user", "content": said})
        if rng.random() >= demonstrator.p_repeat:
            repaired = list(attempt.operations)
            repaired[target.branch(failed)] = target.operations[target.branch(failed)]
            attempt = _slipped(replace(attempt, operations=(repaired[0], repaired[1])), demonstrator, rng)
    return messages


def code_demonstrations(*, count: int, seed: int, demonstrator: CodeDemonstrator) -> list[Mapping[str, Sequence[Message]]]:
    """Return `count` conversations on training tasks, as `{"messages": [...]}`; each task comes about equally often.

    Args:
        count: how many.
        seed: picks the tasks and the demonstrator's choices.
        demonstrator: how it errs.
    """
    rng = random.Random(f"code demonstrations {seed}")
    tasks = branching_tasks(count=6_000, seed=seed)
    return [{"messages": demonstrate_attempts(tasks[number % len(tasks)], demonstrator, rng)} for number in range(count)]


def _first_attempt(
    target: Branching, stated: Sequence[bool], demonstrator: CodeDemonstrator, rng: random.Random
) -> Branching:
    if rng.random() < demonstrator.p_careless:
        return replace(target, operations=("+", "+"))
    read = [
        operation if known else rng.choice([*OPERATIONS]) for operation, known in zip(target.operations, stated, strict=True)
    ]
    return _slipped(replace(target, operations=(read[0], read[1])), demonstrator, rng)


def _slipped(attempt: Branching, demonstrator: CodeDemonstrator, rng: random.Random) -> Branching:
    if rng.random() >= demonstrator.p_slip:
        return attempt
    operations = list(attempt.operations)
    operations[rng.randrange(2)] = rng.choice([*OPERATIONS])
    return replace(attempt, operations=(operations[0], operations[1]))
