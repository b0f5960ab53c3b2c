r"""One notation for one value: thousands, decimal commas, Python, plus-minus, times and choices.

Invariant: every function is pure and takes time linear in a text that `MathGrader` bounds. None evaluates anything.
"""

from __future__ import annotations

import itertools
import re

from agentrl_rewards.characters import latin_math
from agentrl_rewards.extract import boxes
from agentrl_rewards.words import CONSTANT
from agentrl_rewards.wrappers import unwrapped

APPROXIMATELY = re.compile(r"\\(?:approx|simeq|thickapprox)(?![a-zA-Z])|≈")

_SCIENTIFIC = re.compile(r"(?<![\w.])(\d{1,50}(?:\.\d{1,50})?)[eE]([-+]?\d{1,4})(?!\w)")
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
_PYTHON_NAME = re.compile(r"(?<![\\a-zA-Z])(sin|cos|tan|log|exp)(?=\s?\()")
_PYTHON = re.compile(r"\*\*|(?<=[\w)])\s?\*\s?(?=[\w(])")
_ROOT_NAME = re.compile(r"(?<![\\a-zA-Z])sqrt\s?(?=[({\d\\])")
_ROOT_ARGUMENT = re.compile(r"\d+(?:\.\d+)?|\\[a-zA-Z]+(?:\{[^{}]*\})?")
_QUOTIENT = re.compile(
    r"\\(ln|log|lg)(_\{?\w+\}?)?\s?\{?(\d+(?:\.\d+)?|(?<=\s)[a-zA-Z])\}?\s?/\s?(?=\\(?:ln|log|lg)(?![a-zA-Z]))"
)
_OPEN_BOX = re.compile(r"^\s*(?:\$|\\[(\[])?\s*\\{1,2}boxed\s?\{")
"""Of a reference that was cut off."""
_ESCAPED = re.compile(r"\\\\(?=[a-zA-Z])")
_GLUED = re.compile(r"(?<=\d)(and|or)(?=[A-Z\\(\d]|[a-z][\s=(<>])")
_CONSTANT_FUNCTION = re.compile(r"(?<![a-zA-Z\\])([a-zA-Z])\([a-z]\)\s*=\s*(?=-?\d+\s*(?:$|,|;|and|or|\\text))")
"""Whose argument may have any name."""
_NOT_EQUAL = re.compile(r"\\ne(?:q(?![a-zA-Z]))?(?![a-zA-Z])\s?")
_SIGNS = re.compile(r"\\(pm|mp)(?![a-zA-Z])\s?")
_LISTED = re.compile(r"(,|;|\\text\s?\{\s?(?:and|or)\s?\}|(?<![a-zA-Z\\])(?:and|or)(?![a-zA-Z]))")
_MAX_SIGNS = 3
_CLOCK = re.compile(r"(\d{1,2})(?::(\d{2}))?\s{0,4}([ap])\.?\s?m\.?", re.IGNORECASE)
_TEXT_COMMAND = re.compile(r"\\(?:text|mathrm|mbox|textbf|textnormal|mathbf|operatorname)\s?\{([^{}]{0,200})\}|\\[,;: ]|~")
_CHOICE_COMMAND = re.compile(
    r"^\\(?:text|mathrm|mbox|textbf|textnormal|textrm|textit|mathbf|operatorname|bf)\s?\{\s?(\(?\s?[A-J]\s?[).:]?(?:\s[^{}]{0,200})?)\}"
)
_SPACE_COMMAND = re.compile(r"\\[,;: ]|~|\\q?quad")
_WORDS = re.compile(r"\\(?:text|mathrm|mbox|textbf|textit|textnormal|textrm|mathbf)\s?\{([^{}]{0,400})\}")
_DOUBT = re.compile(r"(?i:\b(?:or|not|no|never|maybe|perhaps|wrong|unless|except|isn't)\b)|(?<![\w^{²³.,])\d")
_DENIAL = re.compile(r"(?i:(?<![a-zA-Z\\])(?:not|never|isn't)(?![a-zA-Z]))")
_PARTED = re.compile(r"(?<![\d_^])(?<!_\{)(?<!\^\{)(?<!\\sqrt)\d+(?:\s{1,9}|\s{0,9}\\q?quad\s{0,9})(?=\d)")
_CHOICE = re.compile(r"\(?\s?([A-J])\s?(?:\)|[.:](?=\s|$))(\s{0,8})(.{0,400})", re.DOTALL)
_OTHER_CHOICE = re.compile(r"(?<![\w\\])\(?[A-J][).:](?!\w)|\b(?:or|and)\b")


def plain(text: str) -> str:
    """Return an answer without the marks of a formula around it, in the notation that math-verify reads."""
    inner = _OPEN_BOX.sub("", boxes(text) or text)
    if r"\begin" not in inner:
        inner = _ESCAPED.sub(r"\\", inner)
    inner = unwrapped(latin_math(unwrapped(inner)))
    inner = _plain_numbers(_GLUED.sub(r" \1 ", inner))
    if _PYTHON.search(inner) is not None:
        inner = _POWER.sub(lambda match: f"^{{{match[1].removeprefix('(').removesuffix(')')}}}", inner)
        inner = inner.replace("*", r"\cdot ")
    inner = _with_commands(inner)
    inner = _LETTER.sub(r"\1", inner).replace(r"\varnothing", r"\emptyset")
    inner = _CONSTANT_FUNCTION.sub(r"\1=", inner)
    inner = _NOT_EQUAL.sub(r"\\neq ", inner)
    inner = re.sub(r"\\log_\{?e\}?(?![a-zA-Z])", r"\\ln", inner)
    inner = _QUOTIENT.sub(r"\\\1\2(\3)/", inner)
    inner = _DEGREES.sub(r"\1(\\frac{\3\\pi}{180})", inner)
    inner = _SCIENTIFIC.sub(r"\1\\times 10^{\2}", inner)
    return _each_sign(inner)


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


def _with_commands(text: str) -> str:
    """Return the text with the names of constants, roots and functions as commands."""
    if "text" in text or "mathrm" in text:
        return text
    text = CONSTANT.sub(lambda name: r"\pi " if name[1] else r"\infty " if name[3] else f"\\{name[2]} ", text)
    text = _PYTHON_NAME.sub(r"\\\1 ", text)
    return _with_roots(text)


def _with_roots(text: str) -> str:
    """Return the text with `sqrt(2)`, `sqrt 2` and `sqrt(2 + sqrt(3))` as LaTeX."""
    for _ in range(len(text)):
        found = None
        for found in _ROOT_NAME.finditer(text):  # noqa: B007 - the innermost one is the last
            pass
        if found is None:
            break
        argument = _ROOT_ARGUMENT.match(text, found.end())
        closing = {"(": ")", "{": "}"}.get(text[found.end()])
        if argument is not None:
            content, end = argument[0], argument.end()
        elif closing is not None and (end := _closed(text, found.end(), closing)) is not None:
            content = text[found.end() + 1 : end - 1]
        else:
            break
        text = rf"{text[: found.start()]}\sqrt{{{content}}}{text[end:]}"
    return text


def _closed(text: str, start: int, closing: str) -> int | None:
    """Return where the bracket at `start` is closed."""
    depth = 0
    for place in range(start, len(text)):
        depth += (text[place] == text[start]) - (text[place] == closing)
        if depth == 0:
            return place + 1
    return None


def _each_sign(text: str) -> str:
    r"""Return the text with `1 \pm 2` as `1 + 2, 1 - 2`; of several signs in one expression, `\mp` follows the first."""
    if _SIGNS.search(text) is None:
        return text
    return "".join(part if _LISTED.fullmatch(part) else _both(part) for part in _LISTED.split(text))


def _both(part: str) -> str:
    signs = _SIGNS.findall(part)
    if not signs or len(signs) > _MAX_SIGNS or part.strip()[:1] in ("(", "[", "{") or part.strip()[-1:] in (")", "]"):
        return part
    name, equals, expression = part.rpartition("=")
    if _SIGNS.search(name) is not None:
        return part
    follows = "mp" in signs
    chosen = ["+-", "-+"] if follows else ["".join(each) for each in itertools.product("+-", repeat=len(signs))]
    versions: list[str] = []
    for choice_of_signs in chosen:
        left = iter(choice_of_signs)
        if follows:
            versions.append(_SIGNS.sub(lambda sign: choice_of_signs[0 if sign[1] == "pm" else 1], expression))  # noqa: B023
        else:
            versions.append(_SIGNS.sub(lambda _: next(left), expression))  # noqa: B023 - it is called at once
    return ",".join(f"{name}{equals}{version}" for version in versions)


def same_but_for_the_comma(first: str, second: str) -> bool:
    """Return whether one text is a decimal with a comma and the other the same one with a point."""
    for comma, point in ((first, second), (second, first)):
        if _DECIMAL_COMMA.fullmatch(comma) and _DECIMAL_POINT.fullmatch(point):
            return comma.replace(",", ".") == point
    return False


def clock(text: str) -> tuple[int, int, str] | None:
    """Return the hour, minute and half of the day of a time such as `10:00 a.m.`, else None."""
    found = _CLOCK.fullmatch(_TEXT_COMMAND.sub(lambda match: match[1] or " ", text).strip())
    return None if found is None else (int(found[1]), int(found[2] or 0), found[3].lower())


def choice(text: str) -> tuple[str | None, str | None]:
    r"""Return the letter and the value of an answer such as `C` or `\textbf{(C)}\ 42`; no letter where there are several.

    Example:
        >>> choice("(C)"), choice(r"\textbf{(C)}\ 42"), choice("42"), choice("C. or D. 42")
        (('C', None), ('C', '42'), (None, None), (None, None))
    """
    is_wrapped = _CHOICE_COMMAND.match(text) is not None
    bare = _CHOICE_COMMAND.sub(r"\1 ", text).strip()
    bare = _SPACE_COMMAND.sub(" ", bare).strip("$ ")
    if re.fullmatch(r"[A-J]", bare):
        return bare, None
    found = _CHOICE.fullmatch(bare)
    if found is None or _OTHER_CHOICE.search(found[3]) is not None:
        return None, None
    value = found[3].strip("$ ")
    if value and not (found[2] or is_wrapped):
        return None, None
    return found[1], value or None


def has_doubt(text: str) -> bool:
    r"""Return whether words in an answer deny it or add to it; math-verify drops those of `42 \text{ or 43}` as a unit."""
    if _DENIAL.search(text) is not None:
        return True
    words = [found[1].strip() for found in _WORDS.finditer(text)]
    return any(len(each.split()) > 1 and _DOUBT.search(each) is not None for each in words)


def parts_numbers(text: str) -> bool:
    """Return whether space alone parts two numbers, which math-verify adds: it reads `42 43` as 85."""
    return "frac" not in text and "matrix" not in text and _PARTED.search(text) is not None
