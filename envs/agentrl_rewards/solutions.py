r"""Sets of solutions that are told by relations and by intervals: `x < -5 \text{ or } x > 5` is a union of two intervals.

It runs in worker processes; what it cannot read is None.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias

Formula: TypeAlias = Any
"""An expression or a relation of sympy, which has no types."""
Read: TypeAlias = Callable[[str], Sequence[Formula]]

_TEXT: Final = r"\\(?:text|mathrm|mbox|textnormal|textrm)\s?\{{\s?{}\s?\}}"
_OR: Final = re.compile(
    rf"\s*,?\s*(?:{_TEXT.format('or')}|(?<![a-zA-Z\\])or(?![a-zA-Z])|\\(?:lor|vee)(?![a-zA-Z]))(?:\s|\\[ ,;]|\\q?quad)*"
)
_AND: Final = re.compile(
    rf"\s*,?\s*(?:{_TEXT.format('and')}|(?<![a-zA-Z\\])and(?![a-zA-Z])|\\(?:land|wedge)(?![a-zA-Z]))(?:\s|\\[ ,;])*|"
    r",(?=[^()\[\]]*(?:<|>|\\[lg](?:e|eq|t)(?![a-z])|\\ne))"
)
_RELATION: Final = re.compile(r"<|>|\\(?:[lg](?:e|eq|t|eqslant)|neq?)(?![a-zA-Z])")
_MEMBER: Final = re.compile(r"\s*([a-zA-Z]|\\[a-z]+)\s*\\in(?![a-zA-Z])\s*")


def has_relations(text: str) -> bool:
    """Return whether a text tells a set by relations."""
    return _RELATION.search(text) is not None


def same_solutions(expected: str, given: str, read: Read) -> bool | None:
    """Return whether two texts tell the same set of numbers of the same name; None if one of them tells none."""
    names: set[str] = set()
    sets = [_solutions(text, read, names) for text in (expected, given)]
    if None in sets or len(names) > 1:
        return False if None not in sets else None
    return bool(sets[0] == sets[1])


def _solutions(text: str, read: Read, names: set[str]) -> Formula | None:
    from sympy import Union

    parts = [_conjunction(part, read, names) for part in _OR.split(text)]
    return None if None in parts else Union(*parts)


def _conjunction(text: str, read: Read, names: set[str]) -> Formula | None:
    """Return what all relations allow; what any of them allows where nothing is left: `and` is often written for `or`."""
    from sympy import EmptySet, Intersection, Union

    parts = [_allowed(part, read, names) for part in _AND.split(text)]
    if None in parts:
        return None
    common = Intersection(*parts)
    return Union(*parts) if common is EmptySet or common.is_empty else common


def _allowed(text: str, read: Read, names: set[str]) -> Formula | None:
    member = _MEMBER.match(text)
    if member is not None:
        names.add(member[1].removeprefix("\\"))
        text = text[member.end() :]
    sets = [_set_of(each, names) for each in read(text.strip())]
    return sets[0] if sets else None


def _set_of(formula: Formula, names: set[str]) -> Formula | None:
    """Return the numbers of a set, or those that a linear relation of one variable allows."""
    from sympy import And, FiniteSet, Intersection, Set
    from sympy.core.relational import Relational

    if isinstance(formula, Set):
        return None if isinstance(formula, FiniteSet) and formula.free_symbols else formula
    if isinstance(formula, And):
        parts = [_set_of(each, names) for each in formula.args]
        return None if None in parts else Intersection(*parts)
    if not isinstance(formula, Relational):
        return None
    sides = (formula.lhs, formula.rhs)
    variables = [side for side in sides if getattr(side, "is_Symbol", False)]
    numbers = [side for side in sides if getattr(side, "is_number", False)]
    if len(variables) != 1 or len(numbers) != 1:
        return None
    names.add(str(variables[0]))
    return formula.as_set()
