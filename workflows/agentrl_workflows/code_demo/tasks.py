"""Functions of one line that do one thing to some numbers and another to the rest; the description may leave a gap.

A description names the operation of each branch (`add 7`), or leaves it open (`combine with 7`). What an open one means is
only to be learned from an example that fails, and each example concerns one branch: a task with two gaps may need three
attempts, however good the policy is.

Invariant: training and held-out tasks share no function, whatever their seeds and their gaps.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Final, Literal

from agentrl.errors import ConfigError
from agentrl.types import Task

Split = Literal["train", "held_out"]
CONDITIONS: Final[Mapping[str, str]] = {"even": "x % 2 == 0", "over 10": "x > 10", "under 11": "x < 11"}
"""Each tells 10 from 11, the arguments of the two examples."""
OPERATIONS: Final[Mapping[str, str]] = {"+": "add", "-": "subtract", "*": "multiply by"}
OPEN: Final = "combine with"
NUMBERS: Final = range(2, 10)
EXAMPLE_ARGUMENTS: Final = (10, 11)
_HIDDEN_ARGUMENTS: Final = tuple(number for number in range(2, 41) if number not in EXAMPLE_ARGUMENTS)
_HIDDEN_PER_BRANCH: Final = 1
_HELD_OUT_SHARE: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Branching:
    """The function `x OP a` if the condition holds, else `x OP b`."""

    condition: str
    """A key of `CONDITIONS`."""
    operations: tuple[str, str]
    """Keys of `OPERATIONS`: where the condition holds, and where it does not."""
    numbers: tuple[int, int]

    @property
    def source(self) -> str:
        """The function in Python."""
        (first, second), (a, b) = self.operations, self.numbers
        return f"def f(x):\n    return x {first} {a} if {CONDITIONS[self.condition]} else x {second} {b}\n"

    def branch(self, x: int) -> int:
        """Return 0 where the condition holds, else 1."""
        holds = {"even": x % 2 == 0, "over 10": x > 10, "under 11": x < 11}[self.condition]
        return 0 if holds else 1

    def value(self, x: int) -> int:
        """Return what the function returns."""
        return operate(self.operations[self.branch(x)], x, self.numbers[self.branch(x)])

    @property
    def is_held_out(self) -> bool:
        """Whether its tasks are held out: one function in eight, by its source."""
        return zlib.crc32(self.source.encode()) % _HELD_OUT_SHARE == 0


def operate(operation: str, x: int, number: int) -> int:
    """Return `x + number`, `x - number` or `x * number`."""
    return {"+": x + number, "-": x - number, "*": x * number}[operation]


def branching_tasks(*, count: int, seed: int, split: Split = "train") -> list[Task]:
    """Return `count` different tasks; the same arguments give the same tasks.

    Args:
        count: how many tasks.
        seed: picks the tasks, their order and the arguments of their hidden tests.
        split: one function in eight is held out.

    Each task has `question`, `examples` and `tests` (for `read_tests`; the policy reads of the first only), `reference` (a
    response that is right), and for the demonstrator `condition`, `operations`, `numbers` and `stated` (whether the
    description names the operation).

    Raises:
        ConfigError: there are not so many tasks.

    Example:
        >>> task = branching_tasks(count=1, seed=0)[0]
        >>> task["question"], task["examples"]["calls"][0]
        ('Write f(x): if x is over 10, add 9; otherwise, subtract 2.', ['f(10)', '8'])
    """
    functions = (
        Branching(condition=condition, operations=(first, second), numbers=(a, b))
        for condition, first, second, a, b in product(CONDITIONS, OPERATIONS, OPERATIONS, NUMBERS, NUMBERS)
    )
    chosen = [function for function in functions if function.is_held_out == (split == "held_out")]
    pairs = list(product(chosen, product((True, False), repeat=2)))
    if count > len(pairs):
        raise ConfigError(f"branching_tasks: there are {len(pairs)} {split} tasks, got count {count}")
    rng = random.Random(f"branching tasks {seed}")
    picked = rng.sample(pairs, count)
    return [_task(f"{split}-{seed}-{number}", function, stated, rng) for number, (function, stated) in enumerate(picked)]


def branching_text(function: Branching, stated: Sequence[bool]) -> str:
    """Return the description; an operation that is not stated is left open."""
    words = [OPERATIONS[each] if known else OPEN for each, known in zip(function.operations, stated, strict=True)]
    a, b = function.numbers
    return f"Write f(x): if x is {function.condition}, {words[0]} {a}; otherwise, {words[1]} {b}."


def _task(name: str, function: Branching, stated: Sequence[bool], rng: random.Random) -> Task:
    hidden = [
        argument
        for branch in (0, 1)
        for argument in rng.sample([x for x in _HIDDEN_ARGUMENTS if function.branch(x) == branch], _HIDDEN_PER_BRANCH)
    ]
    return Task(
        id=name,
        data={
            "question": branching_text(function, stated),
            "examples": {"calls": _calls(function, EXAMPLE_ARGUMENTS)},
            "tests": {"calls": _calls(function, hidden)},
            "reference": f"```python\n{function.source}```",
            "condition": function.condition,
            "operations": list(function.operations),
            "numbers": list(function.numbers),
            "stated": list(stated),
        },
    )


def _calls(function: Branching, arguments: Sequence[int]) -> list[list[str]]:
    return [[f"f({argument})", str(function.value(argument))] for argument in arguments]
