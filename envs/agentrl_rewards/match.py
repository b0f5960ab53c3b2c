"""Compare an answer with a reference as text, as numbers, or as sets; quick enough for the event loop.

Invariant: every function takes any text of the model and returns a bool in time linear in its length.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection
from fractions import Fraction

from agentrl.episode.answers import normal_text, read_number
from agentrl.errors import ConfigError
from agentrl_rewards.extract import MAX_SEARCHED_CHARS

_SEPARATORS = re.compile(r"[,;\n]|\band\b")


def exact_match(answer: str | None, reference: str, *, normalize: bool = True) -> bool:
    """Return whether the texts are the same; with `normalize`, as `normal_text` writes them, unless that is empty."""
    if answer is None:
        return False
    expected = normal_text(reference)
    if not normalize or not expected:
        return answer.strip() == reference.strip()
    return normal_text(answer) == expected


def numeric_match(
    answer: str | None, reference: str | float, *, relative_tolerance: float = 1e-6, absolute_tolerance: float = 1e-9
) -> bool:
    """Return whether the answer is a number within either tolerance of the reference, a finite number."""
    if not isinstance(reference, str) and not math.isfinite(reference):
        raise ConfigError(f"numeric_match: the reference must be a finite number, got {reference}")
    expected = read_number(reference) if isinstance(reference, str) else Fraction(reference)
    if expected is None:
        raise ConfigError(f"numeric_match: the reference must be a number, got {reference!r:.80}; use exact_match for text")
    value = None if answer is None else read_number(answer)
    if value is None:
        return False
    allowed = max(Fraction(relative_tolerance) * abs(expected), Fraction(absolute_tolerance))
    return abs(value - expected) <= allowed


def set_match(answer: str | None, reference: str | Collection[str], *, ordered: bool = False) -> bool:
    """Return whether the answer lists exactly the items of the reference, as often; numbers match by value.

    Items are separated by commas, semicolons, lines or `and`; brackets around the list do not count.

    Example:
        >>> set_match("{2, 1.0}", "1, 2"), set_match("1, 2, 3", "1, 2"), set_match("red and Blue", ["blue", "red"])
        (True, False, True)
    """
    if answer is None:
        return False
    items = _items(answer[:MAX_SEARCHED_CHARS])
    expected = _items(reference) if isinstance(reference, str) else [_item(each) for each in reference]
    return items == expected if ordered else Counter(items) == Counter(expected)


def _items(text: str) -> list[Fraction | str]:
    inner = text.strip().strip("$").replace("\\{", "").replace("\\}", "").strip(" ()[]{}")
    return [_item(part) for part in _SEPARATORS.split(inner) if part.strip()]


def _item(text: str) -> Fraction | str:
    number = read_number(text)
    return normal_text(text) if number is None else number
