"""Folds the constant expressions of tests, such as `3 * 19`, `'a' + 'b'` or `set([1, 2])`, without running any of them.

Invariant: only operators and functions of the tables below are applied, to values of built-in types, and a result that could
grow large is refused.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any, Final, cast

from agentrl.errors import ConfigError

_MAX_ITEMS: Final = 100_000
_MAX_BITS: Final = 20_000
_OPERATORS: Final[Mapping[type[ast.operator], Callable[[Any, Any], object]]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.BitOr: operator.or_,
    ast.BitAnd: operator.and_,
    ast.BitXor: operator.xor,
}
_SIGNS: Final[Mapping[type[ast.unaryop], Callable[[Any], object]]] = {
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
    ast.Not: operator.not_,
}
_BUILT_IN: Final[Any] = (
    abs,
    bool,
    dict,
    float,
    frozenset,
    int,
    len,
    list,
    max,
    min,
    round,
    set,
    sorted,
    str,
    sum,
    tuple,
)
FOLDED_FUNCTIONS: Final[Mapping[str, Callable[..., object]]] = {
    **cast("dict[str, Callable[..., object]]", {each.__name__: each for each in _BUILT_IN}),
    **{
        f"math.{name}": getattr(math, name)
        for name in ("sqrt", "floor", "ceil", "log", "log2", "log10", "sin", "cos", "fabs")
    },
}
_NAMES: Final[Mapping[str, float]] = {"math.pi": math.pi, "math.e": math.e, "math.inf": math.inf, "math.tau": math.tau}


def folded(node: ast.expr) -> ast.expr:
    """Return a literal that is equal to the expression.

    Raises:
        ConfigError: it is not constant, or its value is too large or no plain data.

    Example:
        >>> ast.unparse(folded(ast.parse("[2.0 / 4, 'a' + 'b', 3 * 19]", mode="eval").body))
        "[0.5, 'ab', 57]"
    """
    try:
        literal = ast.literal_eval(node)
        del literal
    except (ValueError, TypeError, RecursionError, MemoryError):
        pass
    else:
        return node
    try:
        text = _written(_constant_value(node))
        return ast.parse(text, mode="eval").body
    except (ArithmeticError, ValueError, TypeError, LookupError, AttributeError, RecursionError, MemoryError) as error:
        raise ConfigError(f"{ast.unparse(node)[:200]!r} is no constant: {error}") from None


def _written(value: object) -> str:
    if isinstance(value, frozenset):
        value = set(cast("frozenset[object]", value))
    return "set()" if value == set() and isinstance(value, set) else repr(value)


def _constant_value(node: ast.expr) -> object:
    if isinstance(node, ast.BinOp):
        left, right = _constant_value(node.left), _constant_value(node.right)
        _check_growth(node.op, left, right)
        operate = cast("Callable[[object, object], object]", _OPERATORS[type(node.op)])
        return operate(left, right)
    if isinstance(node, ast.UnaryOp):
        sign = cast("Callable[[object], object]", _SIGNS[type(node.op)])
        return sign(_constant_value(node.operand))
    if isinstance(node, (ast.List, ast.Tuple, ast.Set)):
        made = {ast.List: list, ast.Tuple: tuple, ast.Set: set}[type(node)]
        return made(map(_constant_value, node.elts))
    if isinstance(node, ast.Dict):
        return {
            _constant_value(cast("ast.expr", key)): _constant_value(value)
            for key, value in zip(node.keys, node.values, strict=True)
        }
    if isinstance(node, ast.Call) and not node.keywords:
        return _applied(ast.unparse(node.func), [_constant_value(each) for each in node.args])
    if isinstance(node, ast.Attribute):
        return _NAMES[ast.unparse(node)]
    return ast.literal_eval(node)


def _applied(name: str, values: list[object]) -> object:
    if name == "range":
        numbers = range(*cast("list[int]", values))
        _check_size(len(numbers))
        return list(numbers)
    return FOLDED_FUNCTIONS[name](*values)


def _check_growth(kind: ast.operator, left: object, right: object) -> None:
    if isinstance(kind, ast.Pow):
        bits = left.bit_length() if isinstance(left, int) else 64
        if not isinstance(right, (int, float)) or bits * abs(right) > _MAX_BITS:
            raise ValueError("the power is too large")
    if isinstance(kind, ast.Mult):
        for one, times in ((left, right), (right, left)):
            if isinstance(one, (str, bytes, list, tuple)) and isinstance(times, int):
                _check_size(len(cast("str", one)) * times)
    if isinstance(kind, ast.Mod) and isinstance(left, (str, bytes)):
        raise TypeError("text is not formatted")


def _check_size(size: int) -> None:
    if size > _MAX_ITEMS:
        raise ValueError(f"it has {size:,} items, more than {_MAX_ITEMS:,}")
