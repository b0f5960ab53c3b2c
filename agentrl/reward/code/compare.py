"""Compare what a submission returned or wrote with what was expected, outside the sandbox.

Invariant: no object of a submission is made here. Its text is compared, and shown as values of built-in types, so that no
`__eq__`, no hash and no import of its making runs.
"""

from __future__ import annotations

import json
import math
import re
from typing import Literal, TypeAlias, cast

from agentrl.reward.code.loose import line_equal, python_equal
from agentrl.reward.code.values import ValueTree, decode_value

Comparison: TypeAlias = Literal["exact", "python"]
"""`exact`: types and values must be the same. `python`: as `==`, a tuple equals a list, and lines of an output are compared
without the white space around them and as decimals."""
_NUMBER = re.compile(rb"[-+]?(\d{1,400}(\.\d{0,400})?|\.\d{1,400})([eE][-+]?\d{1,4})?")


def value_matches(expected: str, found: str, tolerance: float | None, comparison: Comparison = "exact") -> bool:
    """Return whether a value is as expected; both in the text of `encode_value`.

    Example:
        >>> from agentrl.reward.code.values import encode_value
        >>> value_matches(encode_value(1), encode_value(True), None), value_matches(encode_value(1), encode_value(1.0), None)
        (False, False)
        >>> value_matches(encode_value([0.3]), encode_value([0.1 + 0.2]), 1e-9)
        True
        >>> value_matches(encode_value((1, 2)), encode_value([1.0, 2]), None, "python")
        True
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
    """Return the tree of a text, in a tuple because it may be None; None if the text is no JSON, or too deep."""
    try:
        return (json.loads(text),)
    except (ValueError, RecursionError):
        return None


def kind_of(tree: ValueTree) -> str:
    """Return the name of a value's type.

    Example:
        >>> kind_of(["tuple", 1, 2]), kind_of(True), kind_of(None)
        ('tuple', 'bool', 'None')
    """
    if isinstance(tree, list):
        return str(tree[0])[:20] if tree else "nothing"
    return "None" if tree is None else type(tree).__name__


def shown_value(text: str) -> str:
    """Return a value as Python shows it; a text that is no value shows as `?`.

    Example:
        >>> from agentrl.reward.code.values import encode_value
        >>> shown_value(encode_value({"a": (1, 2.5)})), shown_value('["dict",1]')
        ("{'a': (1, 2.5)}", '?')
    """
    try:
        return repr(decode_value(text))
    except (ValueError, TypeError, LookupError, OverflowError, RecursionError):
        return "?"


def _is_near(expected: ValueTree, found: ValueTree, tolerance: float) -> bool:
    if not isinstance(expected, list) or expected[0] in ("int", "bytes", "bytearray"):
        return type(expected) is type(found) and expected == found
    if expected[0] == "float":
        return _is_close(float.fromhex(cast("str", expected[1])), _float_of(found), tolerance)
    # Sets, and the keys of dicts, are in the order of their text: near ones may be in another order, and do not match.
    return (
        isinstance(found, list)
        and len(found) == len(expected)
        and all(_is_near(one, other, tolerance) for one, other in zip(expected, found, strict=True))
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
    r"""Return whether an output is as expected, except for white space at the end of lines and of the whole.

    With the comparison `python`, white space at their beginning does not count either, and numbers may be written otherwise.

    Example:
        >>> output_matches("1 2\n3\n", b"1 2 \r\n3", None), output_matches("1 2", b"1  2", None)
        (True, False)
        >>> output_matches("0.5 yes", b"0.50000001 yes", 1e-6)
        True
        >>> output_matches("12666\nyes", b"\n 12666.0\n yes", None, "python")
        True
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
