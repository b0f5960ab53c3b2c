"""`.dockerignore`: the files of a task's folder that COPY and ADD do not see.

Invariant: the patterns mean what they mean to Docker. The last one that fits a path, or a directory above it, decides.
"""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from agentrl.errors import ConfigError
from agentrl_sandbox.harbor.links import refuse_link_out

_SPECIAL: Final = re.compile(r"[*?\[\\]")


class _Pattern(NamedTuple):
    matches: re.Pattern[str]
    brings_back: bool
    """Whether it begins with `!`."""


class IgnoredFiles:
    """Says which paths of a folder are left out of a build, by the patterns of a file in it.

    Raises:
        ConfigError: the file cannot be read, or a pattern is wrong; the message names the line.
    """

    def __init__(self, folder: Path, file: Path) -> None:
        self._folder, self._patterns = folder, list(_patterns(file, folder))

    def is_ignored(self, path: Path) -> bool:
        """Return whether a file, or a directory with all that is below it, is left out."""
        if not self._patterns or path == self._folder:
            return False
        if not path.is_dir() or path.is_symlink():
            return self._fits(path)
        if not self._fits(path):
            return False
        # A pattern with `!` may bring back files below a directory that another one takes out.
        if not any(pattern.brings_back for pattern in self._patterns):
            return True
        return all(self._fits(Path(top, name)) for top, _, names in os.walk(path) for name in names)

    def _fits(self, path: Path) -> bool:
        parts = path.relative_to(self._folder).parts
        ways = ["/".join(parts[: end + 1]) for end in range(len(parts))]
        ignored = False
        for pattern in self._patterns:
            if pattern.brings_back == ignored and any(pattern.matches.fullmatch(way) for way in ways):
                ignored = not pattern.brings_back
        return ignored


def _patterns(file: Path, folder: Path) -> Iterator[_Pattern]:
    refuse_link_out(file, folder)
    try:
        lines = file.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: {error}") from error
    for number, line in enumerate(lines, 1):
        text = "" if line.startswith("#") else line.strip()
        if not text:
            continue
        brings_back = text.startswith("!")
        text = text.removeprefix("!").strip()
        if not text:
            raise ConfigError(f"{file}:{number}: expected a pattern behind '!', got none; add one, or remove the line")
        cleaned = posixpath.normpath(text).lstrip("/")
        try:
            yield _Pattern(re.compile(_expression(cleaned), re.DOTALL), brings_back)
        except re.error as error:
            raise ConfigError(f"{file}:{number}: expected a pattern, got {text!r}: {error}") from None


def _expression(pattern: str) -> str:
    r"""Return the regular expression of a pattern.

    Example:
        >>> _expression("**/*.pyc"), _expression("data/**"), _expression("a?[^b]")
        ('(.*/)?[^/]*\\.pyc', 'data/.*', 'a[^/][^b]')
    """
    if pattern.startswith("**") and pattern[2:3] not in ("", "/") and _SPECIAL.search(pattern[2:]) is None:
        return f".*{re.escape(pattern[2:])}"
    found, at = "", 0
    while at < len(pattern):
        char, rest = pattern[at], pattern[at + 1 :]
        at += 1
        if char == "*" and rest.startswith("*"):
            at += 2 if rest.startswith("*/") else 1
            found += ".*" if at >= len(pattern) else "(.*/)?"
        elif char == "*":
            found += "[^/]*"
        elif char == "?":
            found += "[^/]"
        elif char == "\\" and rest:
            found += re.escape(rest[0])
            at += 1
        else:
            found += char if char in "[]^-" else re.escape(char)
    return found
