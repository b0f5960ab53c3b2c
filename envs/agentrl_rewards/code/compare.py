"""Compare the values and outputs of a submission with the expected ones, outside the sandbox.

Invariant: no object of a submission is made here, so that no `__eq__`, no hash and no import of its making runs.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from typing import Final, Literal, TypeAlias, cast

from agentrl_rewards.code.loose import BAD_TEXT, line_equal, python_equal
from agentrl_rewards.code.values import SCALARS, ValueTree, scalar_value

Comparison: TypeAlias = Literal["exact", "python"]
"""`exact`: types and values must be the same. `python`: as `==`, a tuple equals a list, and lines of an output are compared
without the white space around them and as decimals."""
_BRACKETS: Final = {
    "list": ("[", "]"),
    "tuple": ("(", ")"),
    "set": ("{", "}"),
    "frozenset": ("frozenset({", "})"),
    "dict": ("{", "}"),
}
_UNHASHABLE: Final = frozenset({"list", "set", "dict", "bytearray"})
_NUMBER = re.compile(rb"[-+]?(\d{1,400}(\.\d{0,400})?|\.\d{1,400})([eE][-+]?\d{1,4})?")


def value_matches(expected: str, found: str, tolerance: float | None, comparison: Comparison = "exact") -> bool:
    """Return whether a value is as expected; both in the text of `encode_value`.

    Example:
        >>> from agentrl_rewards.code.values import encode_value
        >>> value_matches(encode_value(1), encode_value(True), None), value_matches(encode_value(1), encode_value(1.0), None)
        (False, False)
    """
    if expected == found:
        return True
    if tolerance is None and comparison == "exact":
        return False
    tree = read_tree(found)
    if comparison == "python":
        return tree is not None and python_equal(json.loads(expected), tree[0], tolerance)
    return tree is not None and _is_near(json.loads(expected), tree[0], tolerance or 0.0)


def read_tree(text: str) -> tuple[ValueTree] | None:
    """Return the tree of a text, in a tuple because it may be None; None if no value has this text, or it is too deep."""
    try:
        tree = cast("ValueTree", json.loads(text))
        _check_tree(tree)
    except BAD_TEXT:
        return None
    return (tree,)


def _check_tree(tree: ValueTree) -> None:
    """Refuse trees that `encode_value` does not write, also unhashable items of sets and keys of dicts."""
    left: list[tuple[object, bool]] = [(tree, False)]
    while left:
        each, is_item = left.pop()
        if each is None or isinstance(each, (bool, int, str)):
            continue
        if not isinstance(each, list):
            raise TypeError(f"expected a value, got {type(each).__name__}")
        kind, *parts = cast("list[object]", each)
        if is_item and kind in _UNHASHABLE:
            raise TypeError(f"an item of a set cannot be a {kind}")
        if kind in SCALARS:
            scalar_value(cast("str", kind), cast("list[str]", parts))
        elif kind == "dict":
            for pair in parts:
                if not isinstance(pair, list):
                    raise TypeError("expected pairs of a key and a value")
                key, value = cast("list[object]", pair)
                left += ((key, True), (value, is_item))
        elif kind in _BRACKETS:
            left.extend((part, is_item or kind in ("set", "frozenset")) for part in parts)
        else:
            raise ValueError(f"expected a kind of value, got {kind!r:.20}")


def kind_of(tree: ValueTree) -> str:
    """Return the name of a value's type, such as `tuple` for `["tuple", 1, 2]`."""
    if isinstance(tree, list):
        return str(tree[0])[:20] if tree else "nothing"
    return "None" if tree is None else type(tree).__name__


def shown_value(text: str, max_chars: int) -> str:
    """Return the beginning of a value as Python shows it; a text that is no value shows as `?`."""
    read = read_tree(text)
    if read is None:
        return "?"
    shown = ""
    for part in _shown_parts(read[0]):
        shown += part
        if len(shown) > max_chars:
            return f"{shown[:max_chars]} ..."
    return shown


def _shown_parts(tree: ValueTree) -> Iterator[str]:
    """Give the text of a value in pieces; no set or dict is made, since hashes of a submission's choice can collide."""
    if not isinstance(tree, list):
        yield repr(tree)
        return
    kind, parts = cast("str", tree[0]), tree[1:]
    if kind in SCALARS:
        texts = cast("list[str]", parts)
        try:
            yield repr(scalar_value(kind, texts))
        except ValueError:  # Python writes no integer of so many digits in decimals
            yield texts[0]
        return
    if not parts and kind in ("set", "frozenset"):
        yield f"{kind}()"
        return
    opening, closing = _BRACKETS[kind]
    yield opening
    for number, part in enumerate(parts):
        yield ", " if number else ""
        if kind == "dict":
            key, part = cast("list[ValueTree]", part)
            yield from _shown_parts(key)
            yield ": "
        yield from _shown_parts(part)
    yield "," * (kind == "tuple" and len(parts) == 1) + closing


def _is_near(expected: ValueTree, found: ValueTree, tolerance: float) -> bool:
    if not isinstance(expected, list) or expected[0] in ("int", "bytes", "bytearray"):
        return type(expected) is type(found) and expected == found
    if expected[0] == "float":
        return _is_close(float.fromhex(cast("str", expected[1])), _float_of(found), tolerance)
    if expected[0] == "dict":
        return isinstance(found, list) and found[0] == "dict" and _are_near_pairs(expected[1:], found[1:], tolerance)
    # Sets, and the keys of dicts, are in the order of their text: near ones may be in another order, and do not match.
    return (
        isinstance(found, list)
        and len(found) == len(expected)
        and all(_is_near(one, other, tolerance) for one, other in zip(expected, found, strict=True))
    )


def _are_near_pairs(expected: list[ValueTree], found: list[ValueTree], tolerance: float) -> bool:
    pairs = cast("list[tuple[list[ValueTree], list[ValueTree]]]", [*zip(expected, found, strict=False)])
    return len(expected) == len(found) and all(
        _is_near(one[0], other[0], tolerance) and _is_near(one[1], other[1], tolerance) for one, other in pairs
    )


def _float_of(tree: ValueTree) -> float | None:
    try:
        if isinstance(tree, list):
            kind, text = tree
            return float.fromhex(cast("str", text)) if kind == "float" else float(int(cast("str", text), 16))
        return float(tree) if isinstance(tree, int) and not isinstance(tree, bool) else None
    except (ValueError, TypeError, OverflowError):
        return None


def _is_close(expected: float, found: float | None, tolerance: float) -> bool:
    if found is None:
        return False
    if math.isnan(expected):
        return math.isnan(found)
    return math.isclose(expected, found, rel_tol=tolerance, abs_tol=tolerance)


def output_matches(expected: str, found: bytes, tolerance: float | None, comparison: Comparison = "exact") -> bool:
    r"""Return whether an output is as expected, but for white space at the end of lines and of the whole.

    The comparison `python` ignores white space at their beginning too, and numbers may be written otherwise.
    """
    wanted, given = expected.encode(errors="surrogatepass"), found
    if comparison == "python":
        wanted, given = wanted.strip(), given.strip()
    wanted, given = _lines(wanted), _lines(given)
    if comparison == "python":
        wanted, given = [line.strip() for line in wanted], [line.strip() for line in given]
        if len(wanted) == len(given) and all(map(line_equal, wanted, given)):
            return True
    if tolerance is None or wanted == given:
        return wanted == given
    pairs = [(one.split(), other.split()) for one, other in zip(wanted, given, strict=False)]
    return len(wanted) == len(given) and all(
        len(one) == len(other) and all(_is_word(*words, tolerance) for words in zip(one, other, strict=True))
        for one, other in pairs
    )


def _lines(output: bytes) -> list[bytes]:
    return [line.rstrip() for line in output.rstrip().split(b"\n")]


def _is_word(expected: bytes, found: bytes, tolerance: float) -> bool:
    if expected == found:
        return True
    if not (_NUMBER.fullmatch(expected) and _NUMBER.fullmatch(found)):
        return False
    return _is_close(float(expected), float(found), tolerance)
