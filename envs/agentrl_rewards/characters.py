"""One alphabet for mathematics: LaTeX and ASCII instead of the signs that Unicode has for them.

Invariant: every function is pure and takes time linear in a text that `MathGrader` bounds.
"""

from __future__ import annotations

import re
import unicodedata
from typing import Final

_SIGNS: Final = {
    "−": "-", "‐": "-", "‑": "-", "–": "-", "—": "-", "➖": "-", "➕": "+",
    "×": r"\times ", "✕": r"\times ", "✖": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "∙": r"\cdot ", "∗": r"\cdot ",
    "•": r"\cdot ", "⋆": r"\cdot ", "÷": "/", "⁄": "/", "∕": "/", "∶": ":", "±": r"\pm ", "∓": r"\mp ",
    "≤": r"\le ", "≦": r"\le ", "⩽": r"\le ", "≥": r"\ge ", "≧": r"\ge ", "⩾": r"\ge ", "≠": r"\neq ", "≈": r"\approx ",
    "∞": r"\infty ", "∅": r"\emptyset ", "⌀": r"\emptyset ", "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ", "∖": r"\setminus ",
    "∨": r"\lor ", "∧": r"\land ", "¬": r"\neg ", "°": r"^\circ ", "º": r"^\circ ", "…": r"\ldots ",
    "ℝ": r"\mathbb{R} ", "ℤ": r"\mathbb{Z} ", "ℕ": r"\mathbb{N} ", "ℚ": r"\mathbb{Q} ", "ℂ": r"\mathbb{C} ",
    "π": r"\pi ", "Π": r"\Pi ", "Σ": r"\Sigma ", "ϕ": r"\phi ", "φ": r"\varphi ", "ς": r"\varsigma ", "ϵ": r"\epsilon ",
    "ε": r"\varepsilon ", "ϑ": r"\vartheta ", "µ": r"\mu ", "「": "[", "」": "]", "、": ",", "。": ".", "〈": "(", "〉": ")",
}  # fmt: skip
_GREEK: Final = {
    chr(code): f"\\{name[-1].lower() if 'SMALL' in name else name[-1].capitalize()} "
    for code in (*range(0x391, 0x3AA), *range(0x3B1, 0x3CA))
    if (name := unicodedata.name(chr(code), "").split()) and name[-1] not in ("OMICRON", "SIGMA") and "FINAL" not in name
}
_TABLE: Final = str.maketrans({**_GREEK, "σ": r"\sigma ", **_SIGNS})
_SUPERSCRIPTS: Final = "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁼⁽⁾ⁿⁱ"
_SUBSCRIPTS: Final = "₀₁₂₃₄₅₆₇₈₉₊₋₌₍₎"
_RAISED: Final = re.compile(f"[{_SUPERSCRIPTS}]+")
_LOWERED: Final = re.compile(f"[{_SUBSCRIPTS}]+")
_ROOTS: Final = {"√": r"\sqrt", "∛": r"\sqrt[3]", "∜": r"\sqrt[4]"}
_ROOT: Final = re.compile(
    r"([√∛∜])\s?(?:\(([^()]{1,200})\)|\{([^{}]{1,200})\}|(\d+(?:\.\d+)?|\\[a-zA-Z]+|[^\W\d_]))", re.UNICODE
)


def latin_math(text: str) -> str:
    r"""Return a text with signs, raised and lowered digits, fractions, roots and digits of other scripts as LaTeX.

    Example:
        >>> latin_math("2√3×x²≤½"), latin_math("４２")
        ('2\\sqrt{3}\\times x^{2}\\le \\frac{1}{2}', '42')
    """
    if text.isascii():
        return text
    text = _RAISED.sub(lambda found: f"^{{{_normal(found[0])}}}", text)
    text = _LOWERED.sub(lambda found: f"_{{{_normal(found[0])}}}", text)
    text = "".join(map(_plain_character, text.translate(_TABLE)))
    return _ROOT.sub(lambda found: f"{_ROOTS[found[1]]}{{{found[2] or found[3] or found[4]}}}", text)


def _normal(text: str) -> str:
    return unicodedata.normalize("NFKC", text).replace("−", "-")


def _plain_character(character: str) -> str:
    if character.isascii() or character in _ROOTS:
        return character
    if (digit := unicodedata.decimal(character, None)) is not None:
        return str(digit)
    kind, _, parts = unicodedata.decomposition(character).partition(" ")
    if kind == "<fraction>":
        numerator, _, denominator = "".join(chr(int(code, 16)) for code in parts.split()).partition("⁄")
        return rf"\frac{{{numerator}}}{{{denominator}}}"
    return unicodedata.normalize("NFKC", character)
