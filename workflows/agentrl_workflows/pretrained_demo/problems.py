"""Word problems of one or two operations, such as `Ann has 12 apples and finds 5 more. How many apples does Ann have now?`.

Invariant: training and held-out problems share no name, no thing and no pair of numbers, whatever their seeds.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from agentrl.errors import ConfigError
from agentrl.types import Task

Operator = Literal["+", "-", "*"]
Split = Literal["train", "held_out"]
OPERATORS: Final[tuple[Operator, ...]] = ("+", "-", "*")

_NAMES: Final[dict[Split, tuple[str, ...]]] = {
    "train": ("Ann", "Bob", "Eva", "Jan", "Kim", "Leo", "Mia", "Tom", "Sam", "Lucy", "Paul", "Rosa"),
    "held_out": ("Anna", "Max", "Zoe", "Ben", "Ivy", "Carl"),
}
_THINGS: Final[dict[Split, tuple[str, ...]]] = {
    "train": ("apples", "books", "coins", "eggs", "nuts", "pens", "cards", "shells", "stamps", "cups"),
    "held_out": ("pears", "buttons", "marbles", "toys", "plates"),
}
_FIRST: Final[dict[Operator, tuple[str, ...]]] = {
    "+": ("{name} has {a} {things} and finds {b} more", "{name} has {a} {things} and buys another {b}"),
    "-": ("{name} has {a} {things} and gives away {b}", "{name} has {a} {things} and loses {b} of them"),
    "*": ("{name} buys {a} boxes with {b} {things} each", "{name} fills {a} bags with {b} {things} each"),
}
_SECOND: Final[dict[Operator, str]] = {"+": "Then {name} gets {c} more", "-": "Then {name} sells {c} of them"}
_QUESTION: Final = "How many {things} does {name} have now?"
_HELD_OUT_SHARE: Final = 8
_MAX_COUNT: Final = 10_000
"""There are several times as many different problems in each split."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Story:
    """A problem before names and things are put in: `((a op b) then c)`."""

    a: int
    op: Operator
    b: int
    then: Literal["+", "-"] | None = None
    c: int = 0

    @property
    def answer(self) -> int:
        """The result of all operations."""
        first = calculate(self.a, self.op, self.b)
        return first if self.then is None else calculate(first, self.then, self.c)


def calculate(a: int, op: Operator, b: int) -> int:
    """Return `a op b`."""
    return {"+": a + b, "-": a - b, "*": a * b}[op]


def problems(*, count: int, seed: int = 0, split: Split = "train", operations: Sequence[int] = (1,)) -> list[Task]:
    """Return `count` tasks with different questions; the same arguments give the same tasks.

    Args:
        count: how many.
        seed: picks them.
        split: held-out problems have names, things and pairs of numbers of their own: one pair in eight.
        operations: of a problem: `[1]`, `[2]`, or `[1, 2]`, which take turns.

    Each task has `question`, `answer` (an integer), `operations`, and `parts`: the same told one operation after the other,
    each part with a `question` and an `answer` of its own.

    Raises:
        ConfigError: an argument cannot be used.

    Example:
        >>> problems(count=1)[0]["operations"]
        1
    """
    if split not in _NAMES:
        raise ConfigError(f"word problems: expected a split of train or held_out, got {split!r}")
    if not 1 <= count <= _MAX_COUNT or not operations or not set(operations) <= {1, 2}:
        raise ConfigError(
            f"word problems: expected a count of 1 to {_MAX_COUNT} and operations of 1 and 2, got {count} and {operations}"
        )
    rng = random.Random(f"word problems {seed} {split}")
    found: dict[str, Task] = {}
    while len(found) < count:
        number = operations[len(found) % len(operations)]
        story = _draw(rng, number)
        *sentences, last = _tell(story, split, rng)
        question = ". ".join([*sentences, last])
        if is_held_out(story) == (split == "held_out") and question not in found:
            results = [calculate(story.a, story.op, story.b), story.answer][:number]
            parts = [{"question": f"{told}. {last}", "answer": each} for told, each in zip(sentences, results, strict=True)]
            data = {"question": question, "answer": story.answer, "operations": number, "parts": parts}
            found[question] = Task(id=f"{split}-{seed}-{len(found)}", data=data)
    return list(found.values())


def is_held_out(story: Story) -> bool:
    """Return whether the first two numbers of a problem belong to the held-out split, whatever is done with them."""
    pair = sorted((story.a, story.b))
    return zlib.crc32(f"{pair[0]} {pair[1]}".encode()) % _HELD_OUT_SHARE == 0


def _draw(rng: random.Random, operations: int) -> Story:
    op = rng.choice(OPERATORS)
    if op == "*":
        a, b = rng.randint(2, 12), rng.randint(3, 20)
    else:
        a, b = rng.randint(11, 99), rng.randint(3, 60)
        if op == "-":
            a, b = max(a, b + 1), min(a - 1, b)
    if operations == 1:
        return Story(a=a, op=op, b=b)
    then: Literal["+", "-"] = rng.choice(("+", "-"))
    first = calculate(a, op, b)
    if then == "-" and first < 3:
        then = "+"
    return Story(a=a, op=op, b=b, then=then, c=rng.randint(2, min(50, first - 1)) if then == "-" else rng.randint(2, 50))


def _tell(story: Story, split: Split, rng: random.Random) -> list[str]:
    """Return the sentences: one for each operation, and the question."""
    words = {"name": rng.choice(_NAMES[split]), "things": rng.choice(_THINGS[split])}
    sentences = [rng.choice(_FIRST[story.op])]
    if story.then is not None:
        sentences.append(_SECOND[story.then])
    return [text.format(**words, a=story.a, b=story.b, c=story.c) for text in (*sentences, _QUESTION)]
