r"""Words of Dockerfile instructions: quotes, escapes and variables, as Docker's own small shell language has them.

Example:
    >>> replaced("${NAME:-one}/$OTHER'$X'", {"OTHER": "two"}, escape="\\")
    'one/two$X'
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Final

_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*|[0-9]|[@*#]")
_WITH_DEFAULT: Final = re.compile(r"(:?)([-+?])(.*)", re.DOTALL)


def replaced(text: str, values: Mapping[str, str], *, escape: str) -> str:
    """Return a word without its quotes and escapes, and with the values of variables; one that is not set is empty.

    Raises:
        ValueError: a quote or a brace has no end, a form of `${}` is unknown, or `${NAME:?why}` asks for a value.
    """
    return _Word(text, values, escape).read("")


def replaced_in_text(text: str, values: Mapping[str, str], *, escape: str) -> str:
    """Return a text in which variables are replaced and quotes stay, as in a here-document.

    Raises:
        ValueError: as `replaced`.
    """
    word = _Word(text, values, escape, keeps_quotes=True)
    return word.read("")


def split_words(text: str, *, escape: str) -> list[str]:
    """Return the words of a line, in which quotes and escapes keep white space together, and stay.

    Raises:
        ValueError: a quote has no end.
    """
    return list(_split(text, escape))


def _split(text: str, escape: str) -> Iterator[str]:
    word, quote, at = "", "", 0
    while at < len(text):
        char = text[at]
        if char == escape and quote != "'" and at + 1 < len(text):
            word += text[at : at + 2]
            at += 2
            continue
        at += 1
        if quote:
            quote = "" if char == quote else quote
        elif char in "'\"":
            quote = char
        elif char.isspace():
            if word:
                yield word
            word = ""
            continue
        word += char
    if quote:
        raise ValueError("No closing quotation")
    if word:
        yield word


class _Word:
    """Reads one word from its left to its right."""

    def __init__(self, text: str, values: Mapping[str, str], escape: str, *, keeps_quotes: bool = False) -> None:
        self._text, self._values, self._escape, self._at = text, values, escape, 0
        self._keeps_quotes = keeps_quotes

    def read(self, end: str) -> str:
        """Return what comes before the character `end`; without one, everything."""
        found: list[str] = []
        while self._at < len(self._text):
            char = self._text[self._at]
            self._at += 1
            if char == end:
                return "".join(found)
            if char == "$":
                found.append(self._variable())
            elif char == self._escape:
                found.append(self._escaped())
            elif char == "'" and not self._keeps_quotes:
                found.append(self._literal())
            elif char == '"' and not self._keeps_quotes:
                found.append(self._double())
            else:
                found.append(char)
        if end:
            raise ValueError(f"expected {end!r} at the end of a variable")
        return "".join(found)

    def _escaped(self) -> str:
        following = self._text[self._at : self._at + 1]
        if self._keeps_quotes and following not in ("$", self._escape):
            return self._escape
        self._at += 1
        return following

    def _literal(self) -> str:
        end = self._text.find("'", self._at)
        if end < 0:
            raise ValueError("No closing quotation")
        found, self._at = self._text[self._at : end], end + 1
        return found

    def _double(self) -> str:
        found: list[str] = []
        while self._at < len(self._text):
            char = self._text[self._at]
            self._at += 1
            if char == '"':
                return "".join(found)
            following = self._text[self._at : self._at + 1]
            if char == "$":
                found.append(self._variable())
            elif char == self._escape and following in ('"', "$", self._escape) and following:
                found.append(following)
                self._at += 1
            else:
                found.append(char)
        raise ValueError("No closing quotation")

    def _variable(self) -> str:
        if self._text[self._at : self._at + 1] != "{":
            match = _NAME.match(self._text, self._at)
            if match is None:
                return "$"
            self._at = match.end()
            return self._values.get(match[0], "")
        match = _NAME.match(self._text, self._at + 1)
        if match is None:
            raise ValueError("expected the name of a variable after '${'")
        self._at = match.end()
        return self._braced(match[0])

    def _braced(self, name: str) -> str:
        """Return what `${NAME...}` stands for; the name is read already."""
        value = self._values.get(name)
        following = self._text[self._at : self._at + 1]
        if following == "}":
            self._at += 1
            return value or ""
        match = _WITH_DEFAULT.match(self._text, self._at)
        if match is None:
            raise ValueError(f"expected ${{{name}}} with :-, :+ or :? at most, got {following!r} after the name")
        self._at += len(match[1]) + 1
        other = self.read("}")
        is_set = bool(value) if match[1] else value is not None
        if match[2] == "+":
            return other if is_set else ""
        if match[2] == "?" and not is_set:
            raise ValueError(f"the variable {name} has no value{f': {other}' if other else ''}")
        return (value or "") if is_set else other
