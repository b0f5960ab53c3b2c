"""Words in answers: names of functions and of constants, which are mathematics, and all others."""

from __future__ import annotations

import re
from typing import Final

_COMMAND: Final = re.compile(r"\\[a-zA-Z]+")
_WORD: Final = re.compile(r"[^\W\d_]{3,}|(?i:\bno\b)")
_GREEK: Final = (
    "alpha|beta|gamma|delta|epsilon|zeta|theta|iota|kappa|lambda|omicron|rho|sigma|tau|upsilon|phi|chi|psi|omega|eta"
)
FUNCTION: Final = re.compile(
    rf"(arc|a)?(sin|cos|tan|cot|sec|csc)h?|ln|log|lg|exp|sqrt|pi|det|min|max|gcd|lcm|mod|inf|infty|infinity|sup|lim|d[xyt]|"
    rf"abs|deg|or|and|{_GREEK}"
)
"""A name of mathematics, in lower case."""
CONSTANT: Final = re.compile(rf"(?<![\\a-zA-Z{{])(?:(pi|PI|Pi)|({_GREEK})|(infinity|infty|oo|inf))(?![a-zA-Z}}])")
"""A constant or Greek letter without its backslash; `xi`, `mu` and `nu` may be products."""


def names_only_functions(text: str) -> bool:
    """Return whether no word of a text has three letters or more, but those of mathematics."""
    words = [word.lower() for word in _WORD.findall(_COMMAND.sub(" ", text))]
    return all(FUNCTION.fullmatch(word) for word in words)
