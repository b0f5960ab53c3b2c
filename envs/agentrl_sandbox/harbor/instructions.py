"""The instructions of a Dockerfile, read from its lines as Docker reads them.

A directive at the top names the character that joins lines. Comments and empty lines between joined lines are left out.
The lines of a here-document belong to the instruction above them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from agentrl.errors import ConfigError

_DIRECTIVE: Final = re.compile(r"#\s*([A-Za-z][A-Za-z0-9]*)\s*=\s*(.+?)\s*")
_DIRECTIVES: Final = ("syntax", "escape", "check")
_DOCUMENT: Final = re.compile(r"(?<!\S)\d*<<(-?)(\"[^\"<\s]+\"|'[^'<\s]+'|[^\s<\"'()&|;>]+)")
_QUOTED: Final = re.compile(r"'[^']*'|\"(?:\\.|[^\"\\])*\"", re.DOTALL)
_TAKE_DOCUMENTS: Final = ("RUN", "COPY", "ADD")


class HereDocument(NamedTuple):
    """Lines below an instruction, up to a line with their name alone."""

    name: str
    text: str
    is_literal: bool
    """Whether the name stands in quotes, so that no variable of the text is replaced."""
    written: str
    """What stands in the instruction, such as `<<-"EOF"`."""


class Instruction(NamedTuple):
    """One instruction of a Dockerfile."""

    name: str
    """In capital letters."""
    rest: str
    where: str
    """File and line, for messages."""
    documents: tuple[HereDocument, ...]
    escape: str
    """The character that joins lines and takes the next one literally."""

    @property
    def said(self) -> str:
        """File, line and name, with which a message begins."""
        return f"{self.where}: {self.name}"


def read_instructions(file: Path) -> list[Instruction]:
    """Return the instructions of a Dockerfile in their order.

    Raises:
        ConfigError: the file cannot be read, a directive is wrong, or a here-document has no end.
    """
    try:
        text = file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: {error}") from error
    lines = list(enumerate(text.replace("\r\n", "\n").split("\n"), 1))
    return list(_Lines(file, lines, _escape_of(file, lines)).instructions())


def _escape_of(file: Path, lines: list[tuple[int, str]]) -> str:
    """Return the character that the directive `escape` at the top names; a backslash without one."""
    escape, known = "\\", set[str]()
    for number, line in lines:
        match = _DIRECTIVE.fullmatch(line.strip())
        name = "" if match is None else match[1].lower()
        if match is None or name not in _DIRECTIVES:
            break
        if name in known:
            raise ConfigError(f"{file}:{number}: expected one directive {name}, got a second one; remove it")
        known.add(name)
        if name == "escape":
            escape = match[2]
            if escape not in ("\\", "`"):
                raise ConfigError(f"{file}:{number}: escape: expected a backslash or a backtick, got {escape!r}")
    return escape


def words_in_list(text: str) -> list[str] | None:
    """Return a list of words in JSON; None: it is none, and so a line of words, as Docker takes it."""
    try:
        return msgspec.json.decode(text, type=list[str])
    except msgspec.DecodeError:
        return None


class _Lines:
    """Walks over the lines of a file."""

    def __init__(self, file: Path, lines: list[tuple[int, str]], escape: str) -> None:
        self._file, self._lines, self._escape, self._at = file, lines, escape, 0
        mark = re.escape(escape)
        self._joins = re.compile(rf"(?:(?<!{mark})){mark}[ \t]*$")

    def instructions(self) -> Iterator[Instruction]:
        while self._at < len(self._lines):
            number, line = self._next()
            if not line.strip() or line.lstrip().startswith("#"):
                continue
            words = self._joined(line.lstrip()).strip().split(maxsplit=1)
            if not words:
                continue
            name, rest, where = words[0].upper(), words[1] if len(words) > 1 else "", f"{self._file}:{number}"
            documents = tuple(self._documents(rest, where)) if name in _TAKE_DOCUMENTS else ()
            yield Instruction(name, rest, where, documents, self._escape)

    def _next(self) -> tuple[int, str]:
        found = self._lines[self._at]
        self._at += 1
        return found

    def _joined(self, line: str) -> str:
        """Return a line with those that its end joins to it, as they are."""
        parts: list[str] = []
        while (end := self._joins.search(line)) is not None:
            parts.append(line[: end.start()])
            line = ""
            while self._at < len(self._lines):
                _, line = self._next()
                if line.strip() and not line.lstrip().startswith("#"):
                    break
                line = ""
        return "".join([*parts, line])

    def _documents(self, rest: str, where: str) -> Iterator[HereDocument]:
        if words_in_list(rest) is not None:
            return
        quoted = [match.span() for match in _QUOTED.finditer(rest)]
        for match in _DOCUMENT.finditer(rest):
            if any(start < match.start() < end for start, end in quoted):
                continue
            name = match[2].strip("'\"")
            text = self._document(name, where, drops_tabs=bool(match[1]))
            yield HereDocument(name, text, name != match[2], match[0])

    def _document(self, name: str, where: str, *, drops_tabs: bool) -> str:
        found: list[str] = []
        while self._at < len(self._lines):
            _, line = self._next()
            line = line.lstrip("\t") if drops_tabs else line
            if line == name:
                return "".join(f"{each}\n" for each in found)
            found.append(line)
        raise ConfigError(f"{where}: expected a line {name!r} at the end of the here-document, got none; add one")
