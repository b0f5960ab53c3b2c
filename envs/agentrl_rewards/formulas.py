r"""Equality of two formulas: math-verify, where it is exact, and what it lacks. It runs in worker processes.

Invariant: nothing is rounded. A decimal equals an exact value if it is that value, or prints it with at least 12 digits.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from agentrl_rewards.notation import APPROXIMATELY
from agentrl_rewards.solutions import has_relations, same_solutions

Formula: TypeAlias = Any
"""An expression, a matrix, a set, or a relation of sympy, which has no types."""

_PRINTED = re.compile(r"[-+]?0*(\d*)\.(\d+)")
_MIN_PRINTED_DIGITS = 12
_SYMBOL = re.compile(r"(?:[a-zA-Z]|\\[a-zA-Z]+)?(?:_\{?\w+\}?)?\s*=?")
_DIGITS = 40
_PLACES = (("7", "3"), ("11", "5"), ("13", "7"), ("17", "11"), ("19", "13"), ("23", "17"))
_FIRM = 1e-12


def equal_formulas(reference: str, answer: str) -> bool:
    """Return whether an answer equals a reference; both in the notation of `notation.plain`."""
    expected, answered = _exact_part(reference), _exact_part(answer)
    if has_relations(expected) or has_relations(answered):
        is_same = same_solutions(expected, answered, _read_formula)
        if is_same is not None:
            return is_same
    if expected.replace(" ", "") == answered.replace(" ", ""):
        return True if answered == answer.strip() else _is_approximated(answer)
    if not any(
        _same_formula(one, other) for one in _read_formula(expected) for other in _read_formula(answered)
    ) and not _is_printed(expected, answered):
        return False
    return _is_approximated(answer)


def _exact_part(text: str) -> str:
    r"""Return the text before `\approx`; the text after it, if that is a symbol alone."""
    parts = [part.strip() for part in APPROXIMATELY.split(text)]
    return parts[1] if len(parts) > 1 and _SYMBOL.fullmatch(parts[0]) else parts[0]


def _is_approximated(answer: str) -> bool:
    r"""Return whether each number after `\approx` is the exact one, rounded or cut."""
    parts = [part.strip() for part in APPROXIMATELY.split(answer)]
    if len(parts) == 1 or (_SYMBOL.fullmatch(parts[0]) and len(parts) == 2):
        return True
    values = [_numeric_value(each) for each in _read_formula(parts[0].rpartition("=")[2])]
    literals = [_literal(part) for part in parts[1:]]
    return (
        bool(values)
        and values[0] is not None
        and all(literal is not None and abs(values[0] - literal[0]) < literal[1] for literal in literals)
    )


def _literal(text: str) -> tuple[Formula, Formula] | None:
    """Return a decimal number and one unit of its last place."""
    from sympy import Rational

    number = re.match(r"([-+]?\d{1,50}(?:\.(\d{1,50}))?)(?![\d.^*/])", text)
    return None if number is None else (Rational(number[1]), Rational(1, 10 ** len(number[2] or "")))


def _read_formula(text: str) -> Sequence[Formula]:
    """Return the meanings of a text, with decimals as exact fractions; nothing if it cannot be read as a whole."""
    from latex2sympy2_extended import NormalizationConfig, normalize_latex
    from math_verify.parser import parse_latex_cached

    config = NormalizationConfig(basic_latex=True, malformed_operators=True, nits=True, boxed="none")
    try:
        return [_exact(parse_latex_cached(normalize_latex(text, config=config)))]
    except MemoryError:
        raise
    except Exception:  # noqa: BLE001 - its grammar and sympy raise any error about a text
        return []


def _exact(formula: Formula) -> Formula:
    from sympy import Float, MatrixBase, Rational

    if isinstance(formula, MatrixBase):
        return formula.applyfunc(_exact)
    decimals = formula.atoms(Float) if hasattr(formula, "atoms") else ()
    return formula.xreplace({decimal: Rational(str(decimal)) for decimal in decimals}) if decimals else formula


def _same_formula(expected: Formula, given: Formula) -> bool:
    from math_verify import verify

    if verify(expected, given, timeout_seconds=None, allow_set_relation_comp=True):  # pyright: ignore[reportArgumentType]
        return not _differ(expected, given) and not _have_other_names(expected, given)
    return _same_but_for_percent(expected, given) or _same_complex(expected, given)


def _same_but_for_percent(expected: Formula, given: Formula) -> bool:
    """Return whether one is a percentage and the other its number; math-verify knows that of integers."""
    from math_verify.grader import get_pct_val

    numbers = [get_pct_val(each) for each in (expected, given)]
    if (numbers[0] is None) is (numbers[1] is None):
        return False
    one, other = (each if number is None else number for each, number in zip((expected, given), numbers, strict=True))
    return bool(one == other)


def _have_other_names(expected: Formula, given: Formula) -> bool:
    """Return whether two relations share no variable, such as `x < 3` and `y < 3`."""
    from math_verify.grader import is_relation

    names = [{str(symbol) for symbol in getattr(each, "free_symbols", ())} for each in (expected, given)]
    return any(is_relation(each) for each in (expected, given)) and all(names) and names[0].isdisjoint(names[1])


def _same_complex(expected: Formula, given: Formula) -> bool:
    r"""Return whether two constants in which `i` is the imaginary unit have one value, such as `e^{i\pi}` and -1."""
    values = [_numeric_value(_with_imaginary_unit(each)) for each in (expected, given)]
    has_unit = any(symbol.name == "i" for each in (expected, given) for symbol in getattr(each, "free_symbols", ()))
    return has_unit and None not in values and bool(abs(values[0] - values[1]) < _FIRM * max(1, abs(values[0])))


def _with_imaginary_unit(formula: Formula) -> Formula:
    from sympy import Expr, I

    if not isinstance(formula, Expr):
        return formula
    return formula.xreplace({symbol: I for symbol in formula.free_symbols if getattr(symbol, "name", "") == "i"})


def _differ(expected: Formula, given: Formula) -> bool:
    """Return whether two expressions that math-verify takes as equal have clearly other values.

    It takes all values below 1e-15 as equal. A percentage may stand for its number.
    """
    from sympy import Expr, Rational, UnevaluatedExpr

    if (
        not isinstance(expected, Expr)
        or not isinstance(given, Expr)
        or expected.has(UnevaluatedExpr)
        or given.has(UnevaluatedExpr)
    ):
        return False
    symbols = sorted(expected.free_symbols | given.free_symbols, key=str)
    if len(symbols) > len(_PLACES):
        return False
    places = {symbol: Rational(*map(int, place)) for symbol, place in zip(symbols, _PLACES, strict=False)}
    one, other = (_numeric_value(each.xreplace(places)) for each in (expected, given))
    return one is not None and other is not None and bool(abs(one - other) > _FIRM * max(abs(one), abs(other)))


def _numeric_value(formula: Formula) -> Formula:
    """Return the number that a constant expression is, to 40 digits, or None."""
    from sympy import Expr

    if not isinstance(formula, Expr) or formula.free_symbols:
        return None
    try:
        value = formula.doit().evalf(_DIGITS)
    except (ArithmeticError, TypeError, ValueError, AttributeError, NotImplementedError):
        return None
    return value if value.is_number and value.is_finite else None


def _is_printed(first: str, second: str) -> bool:
    """Return whether one text is a decimal of at least 12 significant digits, and the other its exact value."""
    for text, other in ((first, second), (second, first)):
        printed = _PRINTED.fullmatch(text)
        if printed is None or len((printed[1] + printed[2]).lstrip("0")) < _MIN_PRINTED_DIGITS:
            continue
        literal = _literal(text)
        for each in _read_formula(other):
            value = _numeric_value(each)
            if (
                literal is not None
                and value is not None
                and bool(abs(value - literal[0]) <= _printing_error(literal, value))
            ):
                return True
    return False


def _printing_error(literal: tuple[Formula, Formula], value: Formula) -> Formula:
    """Return how far a float may be from the exact value: half a unit of its last place, or one step of a double."""
    return max(literal[1] / 2, abs(value) / 2**52)


def load() -> Callable[[str, str], bool]:
    """Return the comparison, ready to use."""
    logging.disable(logging.CRITICAL)  # math-verify warns that its own timeouts are off; the process has better ones
    equal_formulas("1", "x+1")  # compiles its patterns, so that the first job is charged with nothing of that
    return equal_formulas
