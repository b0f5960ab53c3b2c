"""The parts that families of coding tasks share: a draft, and the tests, changes and summaries of numbers and words.

Invariant: a part is a phrase and an expression that mean the same, with a wrong expression that differs
on some of its edges.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Final, TypeAlias

from agentrl.errors import ConfigError

Inputs: TypeAlias = Sequence[tuple[object, ...]]
WORDS: Final = [
    "apple",
    "bread",
    "candle",
    "dragon",
    "eagle",
    "forest",
    "garden",
    "honey",
    "island",
    "jungle",
    "kettle",
    "lemon",
    "mango",
    "needle",
    "orange",
    "pepper",
    "quartz",
    "river",
    "salmon",
    "tulip",
    "umbrella",
    "velvet",
    "walnut",
    "yellow",
    "zebra",
    "ant",
    "bee",
    "cat",
    "dog",
    "elk",
    "fox",
    "goat",
    "hen",
    "ibis",
    "jay",
    "oak",
    "pine",
    "rose",
    "tea",
    "urn",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """A task before its answers are known."""

    name: str
    """Of the function."""
    arguments: str
    statement: str
    reference: str
    """Source of a right solution."""
    wrong: tuple[str, ...]
    """Sources of at least three wrong ones."""
    inputs: tuple[tuple[object, ...], ...]
    """Arguments of the example, and of the hidden tests."""


Family: TypeAlias = Callable[[Random], Draft]


def make_draft(
    call: str, statement: str, reference: str, wrong: Sequence[tuple[str, str]], inputs: Inputs, **values: object
) -> Draft:
    """Return a draft; `<key>` in its texts becomes the value of that name.

    Args:
        call: such as `total(values, limit)`.
        statement: what the function does.
        reference: the source below the line with `def`, indented by four.
        wrong: replacements in the reference; each makes a wrong solution, unless it replaces a text by itself.
        inputs: arguments, the example first.
        values: of the placeholders.

    Raises:
        ConfigError: a replacement is not in the reference.
    """

    def filled(text: str) -> str:
        for key, value in values.items():
            text = text.replace(f"<{key}>", str(value))
        return text

    name, _, rest = call.partition("(")
    head, body = f"def {call}:\n", filled(reference).strip("\n") + "\n"
    pairs = [(filled(text), filled(replacement)) for text, replacement in wrong]
    for text, _ in pairs:
        if text not in body:
            raise ConfigError(f"coding family {name}: {text!r} is not in the reference")
    return Draft(
        name=name,
        arguments=rest.removesuffix(")"),
        statement=filled(" ".join(statement.split())),
        reference=head + body,
        wrong=tuple(head + body.replace(text, replacement) for text, replacement in pairs if text != replacement),
        inputs=tuple(inputs),
    )


@dataclass(frozen=True, slots=True)
class Part:
    """A phrase for an expression."""

    words: str
    code: str
    wrong: str
    """A mistake in it that some of the `edges` show."""
    edges: tuple[int, ...] = ()


def number_test(rng: Random, x: str = "x") -> Part:
    """Return a condition on the number `x`, such as `is divisible by 3`."""
    k, low = rng.randint(2, 9), rng.randint(-5, 12)
    high, rest, digit = low + rng.randint(4, 20), rng.randrange(k), rng.randint(1, 9)
    return rng.choice(
        [
            Part(f"is divisible by {k}", f"{x} % {k} == 0", f"{x} % {k} == 1", (k, 2 * k, 3 * k, k + 1, 0)),
            Part(
                f"leaves a remainder of {rest} when divided by {k} (as Python's `%` gives it)",
                f"{x} % {k} == {rest}",
                f"{x} % {k} == {(rest + 1) % k}",
                (k + rest, 3 * k + rest, rest - k, k + rest + 1),
            ),
            Part(f"is greater than {low}", f"{x} > {low}", f"{x} >= {low}", (low - 1, low, low + 1, low + 3)),
            Part(f"is less than {high}", f"{x} < {high}", f"{x} <= {high}", (high - 1, high, high + 1, high - 3)),
            Part(
                f"lies from {low} to {high}, both included",
                f"{low} <= {x} <= {high}",
                f"{low} < {x} < {high}",
                (low, low + 1, high, high + 1, low - 1, high - 1),
            ),
            Part(
                f"has {digit} as its last decimal digit (of a negative number, too)",
                f"abs({x}) % 10 == {digit}",
                f"{x} % 10 == {digit}",
                (digit, -digit, digit + 10, -digit - 10, digit - 10, 7),
            ),
            Part(
                f"is negative or at least {high}",
                f"{x} < 0 or {x} >= {high}",
                f"{x} < 0 or {x} > {high}",
                (-1, high, high + 1, high - 1, 0),
            ),
            Part(
                "has an odd sum of decimal digits (the sign does not count)",
                f"sum(map(int, str(abs({x})))) % 2 == 1",
                f"{x} % 2 == 1",
                (12, 21, 3, 20, -14, 11),
            ),
        ]
    )


def number_change(rng: Random, x: str = "x") -> Part:
    """Return a change of the number `x`, such as `its square`."""
    a, b, k, low = rng.randint(2, 7), rng.randint(1, 9), rng.randint(3, 12), rng.randint(-3, 5)
    high = low + rng.randint(5, 15)
    return rng.choice(
        [
            Part(f"{a} times the number, plus {b}", f"{a} * {x} + {b}", f"{a} * ({x} + {b})"),
            Part(f"{a} times the number, minus {b}", f"{a} * {x} - {b}", f"{a} * {x} + {b}"),
            Part(f"the square of the number, plus {b}", f"{x} * {x} + {b}", f"2 * {x} + {b}", (3, -3)),
            Part(f"the distance of the number from {k}", f"abs({x} - {k})", f"{x} - {k}", (k - 2, k + 2, 0)),
            Part(f"the remainder of the number by {k} (as `%` gives it)", f"{x} % {k}", f"{x} // {k}", (k, 2 * k + 1, -1)),
            Part(
                f"the number, but {low} where it is lower and {high} where it is higher",
                f"min(max({x}, {low}), {high})",
                f"min({x}, {high})",
                (low - 2, low, high, high + 2),
            ),
            Part(
                "the sum of its decimal digits (the sign does not count)",
                f"sum(map(int, str(abs({x}))))",
                f"abs({x}) % 10",
                (19, -27, 40),
            ),
        ]
    )


def number_summary(rng: Random, chosen: str = "chosen") -> Part:
    """Return a summary of the list `chosen`, such as `their sum`."""
    default = rng.choice([-1, 0, 100])
    return rng.choice(
        [
            Part("their sum", f"sum({chosen})", f"sum(set({chosen}))"),
            Part("how many there are", f"len({chosen})", f"len(set({chosen}))"),
            Part("how many different ones there are", f"len(set({chosen}))", f"len({chosen})"),
            Part(f"the largest ({default} if there is none)", f"max({chosen}, default={default})", f"len({chosen})"),
            Part(f"the smallest ({default} if there is none)", f"min({chosen}, default={default})", f"sum({chosen})"),
            Part("a list of them in rising order", f"sorted({chosen})", chosen),
            Part("a list of them in falling order", f"sorted({chosen}, reverse=True)", f"{chosen}[::-1]"),
            Part("a list of them, the last one first", f"{chosen}[::-1]", chosen),
            Part("a list of the different ones in rising order", f"sorted(set({chosen}))", f"sorted({chosen})"),
            Part(
                f"the last of them ({default} if there is none)",
                f"({chosen} or [{default}])[-1]",
                f"({chosen} or [{default}])[0]",
            ),
        ]
    )


def integers(rng: Random, edges: Sequence[int] = (), *, length: int = 8, low: int = -20, high: int = 40) -> list[int]:
    """Return numbers, some of them edges, some of them twice."""
    found = [rng.choice(edges) if edges and rng.random() < 0.45 else rng.randint(low, high) for _ in range(length)]
    if len(found) > 3 and rng.random() < 0.7:
        found[rng.randrange(len(found))] = found[0]
    return found


def integer_lists(rng: Random, edges: Sequence[int] = (), *, count: int = 10, low: int = -20, high: int = 40) -> Inputs:
    """Return arguments that are one list each, also an empty one."""
    lists = [integers(rng, edges, length=rng.randint(5, 10), low=low, high=high) for _ in range(count)]
    return [(lists[0],), ([],), (integers(rng, edges, length=1, low=low, high=high),), *((each,) for each in lists[1:])]


def sentence(rng: Random, length: int) -> str:
    """Return some words."""
    return " ".join(rng.choice(WORDS) for _ in range(length))


def sentences(rng: Random, *, count: int = 10) -> list[str]:
    """Return texts of several words, also an empty one."""
    return [sentence(rng, 5), "", *(sentence(rng, rng.randint(1, 7)) for _ in range(count - 2))]


def letters(rng: Random, alphabet: str, length: int) -> str:
    """Return a text of these letters."""
    return "".join(rng.choice(alphabet) for _ in range(length))
