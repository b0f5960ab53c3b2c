r"""One notation for one value: thousands, decimal commas, Python, units, times and choices.

Invariant: every function is pure and takes time linear in a text that `MathGrader` bounds. None evaluates anything.
"""

from __future__ import annotations

import re

from agentrl.reward.extract import boxes

APPROXIMATELY = re.compile(r"\\(?:approx|simeq|thickapprox)(?![a-zA-Z])|≈")

_OUTER = re.compile(r"\\[\[(](.*)\\[\])]|\$\$(.*)\$\$|\$(.*)\$", re.DOTALL)
_DOLLAR = re.compile(r"(?<!\\)\$")
_SCIENTIFIC = re.compile(r"(?<![\w.])(\d{1,50}(?:\.\d{1,50})?)[eE]([-+]?\d{1,4})(?!\w)")
_CHARACTERS = str.maketrans(
    {
        "−": "-",
        "×": r"\times ",
        "·": r"\cdot ",
        "≤": r"\le ",
        "≥": r"\ge ",
        "π": r"\pi ",
        "∞": r"\infty ",
        "∅": r"\emptyset ",
        "\u00a0": " ",
        "\u2009": " ",
        "\u202f": " ",
        "\u2007": " ",
    }
)
_NEGATIVE_SPACE = re.compile(r"(?<=\d)\s?\{?,\}?\s?\\!\s{0,4}(?=\d)")
_THIN_GROUPS = re.compile(r"(?<![\d.,])\d{1,3}(?:\s?(?:\\[,;: ]|~)\s?\d{3})+(?!\d)")
_SPACE_GROUPS = re.compile(r"([-+]?)([1-9]\d{0,2}(?: \d{3})+)((?:[.,]\d+)?)(?=\s*(?:$|\\(?:text|mathrm|mbox|%)|%))")
_BRACED_GROUPS = re.compile(r"(?<![\d.,])[1-9]\d{0,2}(?:\{,\}\d{3})+(?!\d)")
_BRACED_COMMA = re.compile(r"(?<=\d)\{,\}(?=\d)")
_DECIMAL_COMMA = re.compile(r"[-+]?(?:0,\d+|\d{4,},\d+|\d{1,3},(?:\d{1,2}|\d{4,}))")
_DECIMAL_POINT = re.compile(r"[-+]?\d+\.\d+")
_MIXED = re.compile(r"([-+]?\d+)\s+(\d{1,9})/(\d{1,9})")
_REPEATING = re.compile(r"(\d{0,50})\.(\d{0,50})\\overline\s?\{(\d{1,50})\}")
_LETTER = re.compile(r"\\(?:mathrm|mathit|mathcal|mathsf|text|textit|textrm)\s?\{\s?([a-zA-Z])\s?\}(?![a-zA-Z]|\^)")
_DEGREES = re.compile(
    r"(\\(?:sin|cos|tan|cot|sec|csc)(?:\^\{?\d\}?)?)\s?(?:\\left)?([({]?)\s?(\d{1,6}(?:\.\d{1,6})?)\s?\^\s?(?:\{\s?\\circ\s?\}|\\circ)\s?(?:\\right)?[)}]?"
)
_POWER = re.compile(r"\*\*\s?(-?\w+(?:\.\d+)?|\([^()]{1,200}\))")
_PYTHON_NAME = re.compile(r"(?<![\\a-zA-Z])(pi|sqrt|sin|cos|tan|log|exp|infty|oo)(?![a-zA-Z])")
_PYTHON = re.compile(r"\*\*|(?<=[\w)])\s?\*\s?(?=[\w(])|(?<![\\a-zA-Z])(?:sqrt|exp|sin|cos|tan|log)\(")
_ROOT = re.compile(r"(?<!\\)\bsqrt\(([^()]{1,200})\)")
_UNIT_WORDS = {
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
_UNITS = {
    word: unit
    for unit, words in _UNIT_WORDS.items()
    for each in (unit, *words.split())
    for word in (each, each + "s" if len(each) > 3 else each)
}
_UNIT_PLACE = re.compile(
    r"(?<=[\d})\s])\s{0,4}(?:\\[,;: ]\s?)?(?:\\(?:text|mathrm|mbox|textnormal|textbf|operatorname)\s?\{([^{}]{1,80})\}|"
    r"([a-zA-Z][a-zA-Z/ ]{0,40}))\s?(?:\^\s?\{?(\d)\}?|([²³]))?\s*$"
)
_INNER_POWER = re.compile(r"(?:\^\s?\{?(\d)\}?|([²³]))")
_SQUARE = re.compile(r"\b(?:square|sq)\b")
_CUBE = re.compile(r"\b(?:cubic|cu)\b")
_CLOCK = re.compile(r"(\d{1,2})(?::(\d{2}))?\s{0,4}([ap])\.?\s?m\.?", re.IGNORECASE)
_TEXT_COMMAND = re.compile(r"\\(?:text|mathrm|mbox|textbf|textnormal|mathbf|operatorname)\s?\{([^{}]{0,200})\}|\\[,;: ]|~")
_WORDS = re.compile(r"\\(?:text|mathrm|mbox|textbf|textit|textnormal|textrm|mathbf)\s?\{([^{}]{0,400})\}")
_DOUBT = re.compile(r"(?i:\b(?:or|not|no|never|maybe|perhaps|wrong|unless|except|isn't)\b)|(?<![\w^{²³.,])\d")
_DENIAL = re.compile(r"(?i:(?<![a-zA-Z\\])(?:not|never|isn't)(?![a-zA-Z]))")
_PARTED = re.compile(r"(?<=\d)(?:\s{1,9}|\s{0,9}\\q?quad\s{0,9})(?=\d)")
_CHOICE = re.compile(r"\(?([A-J])(?:\)|[.:](?=\s))\s{0,8}(.{0,400})", re.DOTALL)
_OTHER_CHOICE = re.compile(r"(?<![\w\\])\(?[A-J][).:](?!\w)|\b(?:or|and)\b")


def plain(text: str) -> str:
    """Return an answer without the marks of a formula around it, in the notation that math-verify reads."""
    inner = boxes(text) or text.strip()
    outer = _OUTER.fullmatch(inner)
    if outer is not None and "$" not in (found := next(part for part in outer.groups() if part is not None)):
        inner = found.strip()
    if len(marks := _DOLLAR.findall(inner)) and len(marks) % 2 == 0:
        inner = _DOLLAR.sub("", inner)
    inner = re.sub(r"(?<!\\)\\$", "", inner.translate(_CHARACTERS).strip()).strip()
    inner = _plain_numbers(inner)
    if _PYTHON.search(inner) is not None:
        inner = _python(inner)
    inner = _LETTER.sub(r"\1", inner).replace(r"\varnothing", r"\emptyset")
    inner = re.sub(r"\\log_\{?e\}?(?![a-zA-Z])", r"\\ln", inner)
    inner = _DEGREES.sub(r"\1(\\frac{\3\\pi}{180})", inner)
    return _SCIENTIFIC.sub(r"\1\\times 10^{\2}", inner)


def _plain_numbers(text: str) -> str:
    """Return the text with numbers as digits and a decimal point."""
    text = _NEGATIVE_SPACE.sub("", text)
    text = _THIN_GROUPS.sub(lambda match: re.sub(r"\D", "", match[0]), text)
    text = _BRACED_GROUPS.sub(lambda match: match[0].replace("{,}", ""), text)
    text = _BRACED_COMMA.sub(".", text)
    groups = _SPACE_GROUPS.match(text)
    if groups is not None:
        text = groups[1] + groups[2].replace(" ", "") + groups[3] + text[groups.end() :]
    mixed = _MIXED.fullmatch(text)
    if mixed is not None:
        text = rf"{mixed[1]}\frac{{{mixed[2]}}}{{{mixed[3]}}}"
    return _REPEATING.sub(_as_fraction, text)


def _as_fraction(decimal: re.Match[str]) -> str:
    whole, start, period = decimal[1] or "0", decimal[2], decimal[3]
    numerator = int(whole + start + period) - int(whole + start)
    return rf"\frac{{{numerator}}}{{{10 ** len(start) * (10 ** len(period) - 1)}}}"


def _python(text: str) -> str:
    text = _POWER.sub(lambda match: f"^{{{match[1].removeprefix('(').removesuffix(')')}}}", text)
    text = _ROOT.sub(r"\\sqrt{\1}", text)
    return _PYTHON_NAME.sub(lambda match: r"\infty " if match[1] == "oo" else f"\\{match[1]} ", text).replace("*", r"\cdot ")


def same_but_for_the_comma(first: str, second: str) -> bool:
    """Return whether one text is a decimal with a comma and the other the same one with a point."""
    for comma, point in ((first, second), (second, first)):
        if _DECIMAL_COMMA.fullmatch(comma) and _DECIMAL_POINT.fullmatch(point):
            return comma.replace(",", ".") == point
    return False


def units_of(text: str) -> frozenset[str]:
    """Return the known units at the end of an answer, each with its power; `$` and `%` count, other words do not."""
    found = {
        sign for sign in ("$", "€", "£") if text.replace("\\", "").startswith(sign) or text.endswith((sign, "\\" + sign))
    }
    if text.rstrip().endswith("%"):
        return frozenset({"%"})
    if re.search(r"\^\s?\{?\s?\\circ\s?\}?$|°$", text):
        return frozenset({"deg"})
    place = _UNIT_PLACE.search(text)
    if place is None:
        return frozenset(found)
    words = place[1] or place[2]
    inner = _INNER_POWER.search(words)
    power = next((p for p in (place[3], place[4], *(inner.groups() if inner else ())) if p), "")
    power = power.translate(str.maketrans("²³", "23"))
    if not power:
        power = "2" if _SQUARE.search(words) else "3" if _CUBE.search(words) else ""
    names = re.findall(r"[a-zA-Z]+/h|[a-zA-Z]+|%", words)
    return frozenset(found | {_UNITS[name] + power for name in names if name in _UNITS})


def clock(text: str) -> tuple[int, int, str] | None:
    """Return the hour, minute and half of the day of a time such as `10:00 a.m.`, else None."""
    found = _CLOCK.fullmatch(_TEXT_COMMAND.sub(lambda match: match[1] or " ", text).strip())
    return None if found is None else (int(found[1]), int(found[2] or 0), found[3].lower())


def choice(text: str) -> str | None:
    """Return the letter of an answer such as `C`, `(C)` or `C. x = 42`; None where there is another choice too."""
    bare = _TEXT_COMMAND.sub(lambda match: match[1] or " ", text).strip()
    if re.fullmatch(r"[A-J]", bare):
        return bare
    found = _CHOICE.fullmatch(bare)
    return None if found is None or _OTHER_CHOICE.search(found[2]) is not None else found[1]


def has_doubt(text: str) -> bool:
    r"""Return whether words in an answer deny it or add to it; math-verify drops those of `42 \text{ or 43}` as a unit."""
    if _DENIAL.search(text) is not None:
        return True
    words = [found[1].strip() for found in _WORDS.finditer(text)]
    return any(len(each.split()) > 1 and _DOUBT.search(each) is not None for each in words)


def parts_numbers(text: str) -> bool:
    """Return whether space alone parts two numbers, which math-verify adds: it reads `42 43` as 85."""
    return "frac" not in text and "matrix" not in text and _PARTED.search(text) is not None
