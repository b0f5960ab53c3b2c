r"""Units at the end of an answer: `3\text{ cm}`, `3 cm`, `12 apples`, `$5`.

Invariant: a unit without a mark, such as the `m` of `3m`, goes only where the rest is one number, and the other answer is a
number too, or has the same unit. Otherwise `5 - 5c` would equal 0.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from agentrl_rewards.words import FUNCTION

_UNIT_WORDS: Final = {
    "cm": "centimeter centimetre cms",
    "mm": "millimeter millimetre",
    "km": "kilometer kilometre kms",
    "m": "meter metre",
    "in": "inch inches",
    "ft": "foot feet",
    "yd": "yard",
    "mi": "mile",
    "kg": "kilogram kilo kgs",
    "g": "gram gm",
    "mg": "milligram",
    "lb": "pound lbs",
    "oz": "ounce",
    "L": "liter litre l",
    "mL": "milliliter millilitre ml",
    "s": "second sec secs",
    "min": "minute mins",
    "h": "hour hr hrs",
    "day": "days",
    "week": "weeks",
    "month": "months",
    "year": "years yr yrs",
    "mph": "",
    "km/h": "kmh kph",
    "rad": "radian",
    "deg": "degree",
    "%": "percent percentage pct",
    "$": "dollar",
    "€": "euro",
    "£": "",
    "ct": "cent",
    "N": "newton",
    "J": "joule",
    "W": "watt",
    "V": "volt",
    "Hz": "hertz",
}
_UNITS: Final = {
    word: unit
    for unit, words in _UNIT_WORDS.items()
    for each in (unit, *words.split())
    for word in (each, each + "s" if len(each) > 3 else each)
}
_TEXT: Final = r"\\(?:text|mathrm|mbox|textnormal|textbf|textit|textrm|operatorname)\s?\{([^{}]{1,80})\}"
_POWER: Final = r"(?:\s?\^\s?\{?\s?(-?\d)\s?\}?)?"
_UNIT_PLACE: Final = re.compile(
    rf"(?<=[\d}})\s])\s{{0,4}}(?:\\[,;: ]\s?)?(?:{_TEXT}|([a-zA-Z][a-zA-Z/ ]{{0,40}}))\s?(?:\^\s?\{{?(\d)\}}?)?\s*$"
)
_MARKED: Final = re.compile(rf"(?:(?:\s|~|\\[,;: ]|/|\\cdot){{0,4}}{_TEXT}{_POWER}){{1,4}}\s*$")
_BARE: Final = re.compile(rf"(.{{1,400}}?)((?:\s|~|\\[,;: ]){{0,4}})([a-zA-Z][a-zA-Z/ ]{{0,60}}){_POWER}", re.DOTALL)
_CURRENCY: Final = re.compile(r"([-+]?)\s?(\\?\$|€|£|¥|₹)\s?(\d.*)|([-+]?\d.*?)\s?(\\?\$|€|£|¥|₹)", re.DOTALL)
_LITERAL: Final = re.compile(
    r"[-+]?(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:\s?/\s?\d+|\s?\\[dt]?frac\s?\{\d+\}\s?\{\d+\})?|[-+]?\\[dt]?frac\s?\{-?\d+\}\s?\{\d+\}"
)
_COMMAND: Final = re.compile(r"\\[a-zA-Z]+")
_BRACED: Final = re.compile(r"\{[^{}]*\}|\([^()]*\)")
_INNER_POWER: Final = re.compile(r"\^\s?\{?(\d)\}?")
_SQUARE: Final = re.compile(r"\b(?:square|sq)\b")
_CUBE: Final = re.compile(r"\b(?:cubic|cu)\b")
_ORDINALS: Final = frozenset({"st", "nd", "rd", "th"})
_NO_DESCRIPTION: Final = re.compile(
    r"(?i:not|and|nor|but|never|maybe|perhaps|wrong|unless|except|isn't|or|no|plus|minus|times)"
)
_OPEN_ENDINGS: Final = tuple("=+-*/<>^_({[,|\\")


class _Measured(NamedTuple):
    number: str
    """The answer without its unit."""
    units: frozenset[str]
    is_marked: bool
    """Whether `\\text` or a sign of a currency shows that it is a unit."""
    may_be_variable: bool
    """Whether it is one letter behind a number without a space, as in `3m`."""


def without_units(expected: str, given: str) -> tuple[str, str] | None:
    r"""Return a reference and an answer without their units; None if the units differ.

    Example:
        >>> without_units(r"5\text{ cm}", "5"), without_units("5 cm", "5 m"), without_units("5 - 5c", "5 - 5")
        (('5', '5'), None, ('5 - 5c', '5 - 5'))
    """
    one, other = _measured(expected), _measured(given)
    if one is not None and other is not None:
        if one.units and other.units and one.units != other.units:
            return None
        is_same = bool(one.units) or one.is_marked or other.is_marked
        return (one.number, other.number) if is_same else (expected, given)
    if one is not None and not one.may_be_variable:
        return (one.number, given) if one.is_marked or _is_constant(given) else (expected, given)
    if other is not None and (other.is_marked or _is_constant(expected)):
        return expected, other.number
    return expected, given


def units_of(text: str) -> frozenset[str]:
    """Return the known units at the end of an answer, each with its power; `$` and `%` count, other words do not."""
    found = {
        sign for sign in ("$", "€", "£") if text.replace("\\", "").startswith(sign) or text.endswith((sign, "\\" + sign))
    }
    if text.rstrip().endswith("%"):
        return frozenset({"%"})
    if re.search(r"\^\s?\{?\s?\\circ\s?\}?\s*$", text):
        return frozenset({"deg"})
    place = _UNIT_PLACE.search(text)
    if place is None:
        return frozenset(found)
    words = place[1] or place[2]
    inner = _INNER_POWER.search(words)
    power = next((each for each in (place[3], *(inner.groups() if inner else ())) if each), "")
    if not power:
        power = "2" if _SQUARE.search(words) else "3" if _CUBE.search(words) else ""
    names = re.findall(r"[a-zA-Z]+/h|[a-zA-Z]+|%", words)
    return frozenset(found | {_UNITS[name] + power for name in names if name in _UNITS})


def _measured(text: str) -> _Measured | None:
    """Return the parts of an answer with a unit or a description, None for others."""
    currency = _CURRENCY.fullmatch(text)
    if currency is not None and _is_constant(number := f"{currency[1] or ''}{currency[3] or currency[4]}"):
        return _Measured(number, frozenset({(currency[2] or currency[5]).removeprefix("\\")}), True, False)
    marked = _MARKED.search(text)
    if marked is not None and (rest := text[: marked.start()].rstrip()) and not rest.endswith(_OPEN_ENDINGS):
        units = units_of(text)
        words = re.findall(_TEXT, marked[0])
        is_unit = units or any(word != word.strip(" ~") or len(word) > 2 for word in words)
        return _Measured(rest, units, True, False) if is_unit else None
    bare = _BARE.fullmatch(text)
    if bare is None:
        return None
    number, space, words = bare[1], bare[2], bare[3].strip()
    is_literal = _LITERAL.fullmatch(number) is not None
    is_letter = len(words) == 1
    if not _is_unit(words) or not (is_literal or (space and not is_letter and _is_constant(number))):
        return None
    return _Measured(number, units_of(text), False, is_letter and not space and bare[4] is None)


def _is_unit(words: str) -> bool:
    names = re.findall(r"[a-zA-Z]+/h|[a-zA-Z]+", words)
    if any(_NO_DESCRIPTION.fullmatch(name) or FUNCTION.fullmatch(name.lower()) for name in names):
        return False
    return all(name in _UNITS or name in _ORDINALS or len(name) > 2 for name in names)


def _is_constant(text: str) -> bool:
    """Return whether a text is one number: no letter stands in it, and nothing is added or listed outside of brackets."""
    plain = _COMMAND.sub(" ", text)
    if any(character.isalpha() for character in plain) or not any(character.isdigit() for character in text):
        return False
    while (shorter := _BRACED.sub(" ", plain)) != plain:
        plain = shorter
    return re.search(r"[+=<>;]|(?<=\S)\s*-|,(?!\d{3})", plain.strip()) is None
