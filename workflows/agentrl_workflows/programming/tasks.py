"""Eighty original programming tasks, written for this package, twenty at each level.

Invariant: in every task the reference passes all tests, and each of its three wrong solutions fails a hidden one
(`tests/workflows/tasks/test_programming.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final, Literal

import msgspec

from agentrl.config import load_yaml
from agentrl.errors import ConfigError
from agentrl.types import Task

PROGRAMMING_LEVELS: Final = (1, 2, 3, 4)
"""One expression; one loop or table; an algorithm; several parts or an algorithm with cases."""
_HELD_OUT_EVERY: Final = 5
_FORMAT: Final = "Answer with the whole function in one block of Python code."


class ProgrammingTask(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One function to write."""

    name: str
    """Of the function, and unique."""
    arguments: str
    """Such as `values, n`."""
    statement: str
    tests: list[tuple[str, str]]
    """Pairs of a call and its value, in Python. The policy sees the first, as an example."""
    reference: str
    """Source of a right solution."""
    wrong: list[tuple[str, str]]
    """Replacements in the reference that make wrong solutions."""

    @property
    def question(self) -> str:
        """The task as the policy reads it."""
        call, value = self.tests[0]
        return (
            f"Write a Python function `{self.name}({self.arguments})`. {self.statement.strip()}\n\n"
            f"Example: `{call}` returns `{value}`.\n\n{_FORMAT}"
        )

    def wrong_solutions(self) -> list[str]:
        """Return the sources of the wrong solutions.

        Raises:
            ConfigError: a replacement is not in the reference.
        """
        for text, _ in self.wrong:
            if text not in self.reference:
                raise ConfigError(f"programming task {self.name}: {text!r} is not in the reference")
        return [self.reference.replace(text, replacement) for text, replacement in self.wrong]


def load_programming_tasks(level: int) -> list[ProgrammingTask]:
    """Return the tasks of one level with their solutions.

    Raises:
        ConfigError: there is no such level.
    """
    if level not in PROGRAMMING_LEVELS:
        raise ConfigError(f"programming tasks: expected a level of {PROGRAMMING_LEVELS}, got {level!r}")
    text = (Path(__file__).parent / f"level_{level}.yaml").read_text(encoding="utf-8")
    return msgspec.convert(load_yaml(text), list[ProgrammingTask])


def programming_tasks(
    levels: Sequence[int] = PROGRAMMING_LEVELS, *, split: Literal["train", "held_out"] | None = None
) -> list[Task]:
    r"""Return the tasks of some levels, for `agentrl_rewards.code`.

    The fields are `question`, `examples` (the one in the question) and `tests` (hidden), both for `read_tests`, `level`, and
    `reference`, a response with the reference solution.

    Args:
        levels: which ones.
        split: None: all tasks. Of each level, every fifth task is held out and the others are for training.

    Raises:
        ConfigError: there is no such level or split.

    Example:
        >>> task = programming_tasks([1])[0]
        >>> task.id, task["level"], task["tests"]["calls"][0]
        ('programming-1-count_vowels', 1, ["count_vowels('rhythm')", '0'])
    """
    if split not in (None, "train", "held_out"):
        raise ConfigError(f"programming tasks: expected the split train or held_out, got {split!r}")
    return [
        Task(
            id=f"programming-{level}-{each.name}",
            data={
                "question": each.question,
                "examples": {"calls": [list(each.tests[0])]},
                "tests": {"calls": [list(pair) for pair in each.tests[1:]]},
                "level": level,
                "reference": f"```python\n{each.reference}```",
            },
        )
        for level in levels
        for number, each in enumerate(load_programming_tasks(level), 1)
        if split is None or (number % _HELD_OUT_EVERY == 0) == (split == "held_out")
    ]
