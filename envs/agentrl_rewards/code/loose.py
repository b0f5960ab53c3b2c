"""Compare as Python's `==` and the graders of public data sets do, on the text of values.

Invariant: no method of a submission hashes or orders a value. A text that is no value equals nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import Final, cast

from agentrl_rewards.code.values import ValueTree, decode_value, tree_text

_SEQUENCES: Final = frozenset({"list", "tuple"})
_SETS: Final = frozenset({"set", "frozenset"})
_BYTES: Final = frozenset({"bytes", "bytearray"})
_NUMBERS: Final = frozenset({"int", "float", "complex"})
_HASHABLE: Final = frozenset({"tuple", "frozenset", "bytes"})
_MAX_KEY_DEPTH: Final = 100
_MAX_NUMBER_CHARS: Final = 400
BAD_TEXT: Final = (ValueError, TypeError, LookupError, OverflowError, RecursionError)
"""Errors of reading a text that is no value."""


def python_equal(expected: ValueTree, found: ValueTree, tolerance: float | None) -> bool:
    """Return whether two values are equal in Python, where a tuple also equals a list.

    With a tolerance, an expected float allows any number within this share of it, or within this distance.
    """
    try:
        return _equal(expected, found, tolerance)
    except BAD_TEXT:
        return False


def _equal(expected: ValueTree, found: ValueTree, tolerance: float | None) -> bool:
    kind, other = group_of(expected), group_of(found)
    if kind != other:
        return False
    if kind == "number":
        return _numbers_equal(expected, found, tolerance)
    if kind not in ("sequence", "set", "dict"):
        parts = (cast("list[ValueTree]", each)[1] if kind == "bytes" else each for each in (expected, found))
        return next(parts) == next(parts)
    ours, theirs = cast("list[ValueTree]", expected)[1:], cast("list[ValueTree]", found)[1:]
    if kind == "set":
        return {_equality_key(each) for each in ours} == {_equality_key(each) for each in theirs}
    if len(ours) != len(theirs):
        return False
    if kind == "dict":
        wanted, given = _by_key(ours), _by_key(theirs)
        return wanted.keys() == given.keys() and all(_equal(value, given[key], tolerance) for key, value in wanted.items())
    return all(_equal(one, another, tolerance) for one, another in zip(ours, theirs, strict=True))


def group_of(tree: ValueTree) -> str:
    """Return the group of types within which values may be equal in Python, such as `number`."""
    if isinstance(tree, list):
        kind = tree[0] if tree and isinstance(tree[0], str) else "nothing"
        groups = {"sequence": _SEQUENCES, "set": _SETS, "bytes": _BYTES, "number": _NUMBERS}
        return next((name for name, kinds in groups.items() if kind in kinds), kind)
    return "number" if isinstance(tree, (bool, int)) else type(tree).__name__


def _number_of(tree: ValueTree) -> int | float | complex:
    if isinstance(tree, (bool, int)):
        return tree
    value = decode_value(tree_text(tree))
    return cast("int | float | complex", value)


def _numbers_equal(expected: ValueTree, found: ValueTree, tolerance: float | None) -> bool:
    wanted, given = _number_of(expected), _number_of(found)
    if wanted == given or (wanted != wanted and given != given):
        return True
    if tolerance is None or not isinstance(wanted, float) or isinstance(given, complex):
        return False
    return math.isclose(wanted, given, rel_tol=tolerance, abs_tol=tolerance)


def _equality_key(tree: ValueTree, depth: int = 0) -> Hashable:
    """Return a key that is the same for all hashable values that are equal in Python; a TypeError for other values."""
    if depth > _MAX_KEY_DEPTH:
        raise RecursionError(f"expected at most {_MAX_KEY_DEPTH} levels in an item of a set")
    kind = group_of(tree)
    if kind == "number":
        return kind, _number_key(_number_of(tree))
    if not isinstance(tree, list):
        return kind, tree
    if tree[0] not in _HASHABLE:
        raise TypeError(f"an item of a set cannot be a {tree[0]}")
    if kind == "bytes":
        return kind, cast("str", tree[1])
    parts = [_equality_key(each, depth + 1) for each in tree[1:]]
    return kind, frozenset(parts) if kind == "set" else tuple(parts)


def _number_key(number: complex) -> str:
    """Return a text, since a submission can choose numbers that all have one hash."""
    if isinstance(number, complex) and number.imag == 0:
        number = number.real
    if isinstance(number, float) and number.is_integer():
        number = int(number)
    return hex(number) if isinstance(number, int) else repr(number)


def _by_key(pairs: Sequence[ValueTree]) -> dict[Hashable, ValueTree]:
    return {_equality_key(key): value for key, value in cast("Sequence[tuple[ValueTree, ValueTree]]", pairs)}


def apply_views(views: Sequence[str], tree: ValueTree) -> tuple[ValueTree] | None:
    """Return the result of `set(value)` and its like, the first of `views` applied first; None if Python would raise."""
    try:
        for view in views:
            tree = VIEWS[view](tree)
    except BAD_TEXT:
        return None
    return (tree,)


def _item_trees(tree: ValueTree) -> list[ValueTree]:
    if isinstance(tree, str):
        return [*tree]
    kind = tree[0] if isinstance(tree, list) else ""
    if kind == "dict":
        return [cast("list[ValueTree]", pair)[0] for pair in cast("list[ValueTree]", tree)[1:]]
    if kind not in _SEQUENCES | _SETS:
        raise TypeError("the value has no items")
    return cast("list[ValueTree]", tree)[1:]


def _as_set(tree: ValueTree) -> ValueTree:
    unique = {_equality_key(each): each for each in _item_trees(tree)}.values()
    return ["set", *sorted(unique, key=tree_text)]  # in the order of `encode_value`


def _sorted(tree: ValueTree) -> ValueTree:
    return ["list", *sorted(_item_trees(tree), key=lambda each: cast("int", _order_key(each)))]


@dataclass(frozen=True, slots=True)
class _Unordered:
    """A value without an order: Python raises where it would have to be the smaller one."""

    text: str


def _order_key(tree: ValueTree) -> object:
    """Return the value, with its sets and dicts as texts: hashes of a submission's choice can collide."""
    if group_of(tree) == "number":
        return _number_of(tree)
    if not isinstance(tree, list):
        return _Unordered("None") if tree is None else tree
    if tree[0] in _SEQUENCES:
        items = [_order_key(each) for each in tree[1:]]
        return items if tree[0] == "list" else tuple(items)
    return bytes.fromhex(cast("str", tree[1])) if tree[0] in _BYTES else _Unordered(tree_text(tree))


VIEWS: Final[Mapping[str, Callable[[ValueTree], ValueTree]]] = {
    "set": _as_set,
    "frozenset": _as_set,
    "list": lambda tree: ["list", *_item_trees(tree)],
    "tuple": lambda tree: ["tuple", *_item_trees(tree)],
    "sorted": _sorted,
    "len": lambda tree: len(_item_trees(_as_set(tree) if isinstance(tree, list) and tree[0] in _SETS else tree)),
}
"""Functions that a test may apply to a result before it compares; they run on the text of the value."""


def line_equal(expected: bytes, found: bytes) -> bool:
    """Return whether two lines are the same, or have the same numbers in decimals."""
    if expected == found:
        return True
    try:
        wanted = [_decimal(word) for word in expected.split()]
        return bool(wanted) and wanted == [_decimal(word) for word in found.split()]
    except (InvalidOperation, ValueError):
        return False


def _decimal(word: bytes) -> Decimal:
    if len(word) > _MAX_NUMBER_CHARS or b"_" in word or not word.isascii():
        raise ValueError(word[:20])
    return Decimal(word.decode())
