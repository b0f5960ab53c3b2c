"""The answer of an episode as text or as a number, so that equal answers are found equal.

Invariant: every function takes any text of the model, in time linear in its length.
"""

from __future__ import annotations

import re
import unicodedata
from fractions import Fraction

_MAX_CHARS = 50_000
_LATEX_TEXT = re.compile(r"\\(?:text|mathrm|mathbf|textbf|mathit|operatorname)\s{0,8}\{([^{}]{0,200})\}")
_DROPPED = re.compile(r"\\[ ,;:!]|[$;:!?'\"`(){}\[\]*_~\\]|(?<!\d)[\s.,]|[\s.,](?!\d)")
_FRACTION = re.compile(r"[-+]?\d{1,300}(?:\.\d{1,300})?(?:[eE][-+]?\d{1,3})?")
_LATEX_FRACTION = re.compile(r"([-+]?)\s{0,8}\\[dt]?frac\s{0,8}\{([^{}]{1,300})\}\s{0,8}\{([^{}]{1,300})\}")


def normal_text(text: str) -> str:
    r"""Return `text` without case, white space, punctuation and LaTeX markup of text."""
    short = _LATEX_TEXT.sub(r"\1", unicodedata.normalize("NFKC", text[:_MAX_CHARS]))
    return _DROPPED.sub("", short).casefold()


def read_number(text: str) -> Fraction | None:
    r"""Return the number that `text` is, exactly; None if it is something else or has more than 300 digits.

    Signs, decimals, exponents, `a/b`, LaTeX fractions, thousands separators, `$` and `%` are read.

    Example:
        >>> read_number("-1,234.5"), read_number("3/4"), read_number("12%"), read_number("twelve")
        (Fraction(-2469, 2), Fraction(3, 4), Fraction(3, 25), None)
    """
    if len(text) > 1_000:
        return None
    plain = text.strip().strip("$").replace("\\$", "").replace("$", "").replace("−", "-").strip()
    percent = plain.endswith("%")
    plain = plain.removesuffix("%").removesuffix("\\").strip()
    plain = _LATEX_FRACTION.sub(r"\1\2/\3", plain)
    if re.fullmatch(r"[-+]?\d{1,3}(?:,\d{3})+(?:\.\d+)?", plain):
        plain = plain.replace(",", "")
    parts = [part.strip() for part in plain.split("/")]
    parts = ["0" + part if part.startswith(".") else part.replace("-.", "-0.", 1) for part in parts]
    if len(parts) > 2 or not all(_FRACTION.fullmatch(part) for part in parts):
        return None
    numbers = [Fraction(part) for part in parts]
    if len(numbers) == 2 and numbers[1] == 0:
        return None
    value = numbers[0] if len(numbers) == 1 else numbers[0] / numbers[1]
    return value / 100 if percent else value
