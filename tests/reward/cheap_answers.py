"""Wrong answers that a policy could find cheaply: right ones that end early, gain a unit, a sign, a digit or a choice."""

from __future__ import annotations

import re
from collections.abc import Iterator

EXPRESSIONS = (
    "5 - 5c", "x+3m", "5+4g", "7-2h", "3t+4s", "2x+3l", "a+2d", "6n-6m", "x^2+2t", r"\frac{3c}{2}", "(x+3)(x-2)",
    "2x^2-3x+5", "2^{3m}", r"\frac{1}{2}+3s", r"2\sqrt{3}+4h", r"\frac{x+1}{x-4}", "3x - 7y + 11z", "12 - 8i",
    r"4\pi+3d", "k^2+k+41", r"5\cos t + 12 s", "9h^2+4g", r"\frac{5}{7}m+2", "100 - 37l",
)  # fmt: skip
"""All of whose beginnings have other values."""
NUMBERS = (
    "42", "-17", r"\frac{3}{7}", "0.125", r"\sqrt{13}", r"2\sqrt{5}", r"\frac{7\pi}{3}", r"\log_2 3", "1{,}250", "3^{11}",
    r"\frac{5+\sqrt{17}}{2}", r"\ln 5", "12!", r"6\text{ cm}", "15 m", r"\$25", r"75^\circ", "30\\%", r"\textbf{(C)}\ 58",
)  # fmt: skip
SETS = (
    r"(-\infty,-5)\cup(5,\infty)", r"x<-5 \text{ or } x>5", r"-2 \le x \le 7", "(3, 11]", r"\{2, 3, 11\}", "2, 5, 13",
    r"x = \frac{-1\pm\sqrt5}{2}", r"\pm 6", r"1\pm\sqrt{3}", r"x \in [4, 9]", "(3, -8)",
)  # fmt: skip
UNITS = ("c", "d", "g", "h", "l", "m", "s", "t", " cm", r"\text{ m}", r"\mathrm{kg}")
OTHER_UNITS = {"cm": ("m", "mm", "kg"), "m": ("cm", "km", "s")}
_OPERATOR = re.compile(r"(?<=[\w)}\s])\s?[-+]\s?(?![^{(]*[})])|(?<=[})\d])(?=\()")
_NUMBER = re.compile(r"\d+")
_LETTER = re.compile(r"(?<![\\a-zA-Z])[a-zA-Z](?![a-zA-Z])")


def cheap_answers() -> list[tuple[str, str]]:
    """Return pairs of a reference and a wrong answer, each one once."""
    pairs: dict[tuple[str, str], None] = {}
    for reference in EXPRESSIONS + NUMBERS + SETS:
        for answer in (*_common(reference), *_of_kind(reference)):
            if answer.strip() and answer.replace(" ", "") != reference.replace(" ", ""):
                pairs[reference, answer] = None
    return list(pairs)


def _common(reference: str) -> Iterator[str]:
    """Return another number or sign in place of one, other answers beside the right one, and denials."""
    for number in list(_NUMBER.finditer(reference))[:3]:
        before, after = reference[: number.start()], reference[number.end() :]
        yield f"{before}{int(number[0]) + 1}{after}"
        yield f"{before}{number[0]}7{after}"
    yield from (f"{reference}, 977", rf"{reference} \text{{ or }} 977", rf"\text{{not }} {reference}")
    yield from (rf"\boxed{{{reference}}} \boxed{{977}}", "977", "-977", r"\{0, 1, 2, 977\}", "A, B, D, E")


def _of_kind(reference: str) -> Iterator[str]:
    if reference in EXPRESSIONS:
        yield from _of_expression(reference)
    elif reference in NUMBERS:
        yield from (rf"{reference} \pm 1", f"{reference} + 1", f"{reference}x", rf"{reference} = 977", f"{reference} 977")
        if r"\log" in reference or r"\ln" in reference:
            yield from ("2 3", "23", r"\log_3 2", r"\log 23", r"\ln 3 \cdot \ln 2")
        if "C" in reference:
            yield from ("B", r"\textbf{(B)}\ 58", r"\textbf{(C)}\ 59", "(A)(B)(C)(D)", "A or C", "ABCDE")
        for name, others in OTHER_UNITS.items():
            if re.search(rf"(?<![a-z]){name}(?![a-z])", reference):
                yield from (reference.replace(name, other) for other in others)
                yield f"{reference}^2"
    else:
        yield from (reference.replace(r"\cup", r"\cap"), reference.replace("<", r"\le "))
        yield from (reference.replace("or", "or x=0 or"), reference.replace(r"\pm", "+"), reference.replace(r"\pm", "-"))
        yield from (part for part in re.split(r",(?![^(\[]*[)\]])|\\text\{ or \}|\\cup", reference)[:1])


def _of_expression(reference: str) -> Iterator[str]:
    """Return its beginnings, its value without a letter, another letter, and units behind it."""
    for operator in _OPERATOR.finditer(reference):
        yield reference[: operator.start()]
    without = _LETTER.sub("", reference)
    if r"\cos" not in reference and "frac" not in reference and re.search(r"\^\s*[-+]|\(\s*[-+]|[-+]\s*$", without) is None:
        yield without
    for letter in list(_LETTER.finditer(reference))[:2]:
        other = "q" if letter[0] != "q" else "u"
        yield reference[: letter.start()] + other + reference[letter.end() :]
        yield reference[: letter.start()] + reference[letter.end() :]
    yield f"-({reference})"
    for unit in UNITS[:8]:
        yield f"{reference}{unit}"
