"""Tests that fetch packages before they judge, in an image that lacks these packages.

Invariant: only what the tests say over an untouched environment counts, which no agent has changed. Tests that find their
packages in the image are let through, whatever else they try to fetch.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final, NamedTuple

_RUNNER: Final = re.compile(r"(?:^|[\s;&|(!/])(uvx|uv\s+run|uv\s+tool\s+run|pipx\s+run|npx)\s")
"""Programs that fetch packages and run them at once."""
_INSTALL: Final = re.compile(
    r"(?:^|[\s;&|(!/])((?:uv\s+)?pip3?\s+install|apt-get\s[^;&|]*?install|apt\s[^;&|]*?install|apk\s+add|npm\s+(?:install|ci))"
    r"\s+([^;&|#]*)"
)
_PACKAGE: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_NO_PACKAGE_FETCHED: Final = re.compile(r"(?:Failed to fetch:? `|Request failed after|npm ERR! .*EAI_AGAIN).{0,120}")
"""What uv and npm say, and apt does not, after whose failure tests may find all that they need."""


class Fetch(NamedTuple):
    """A command of a test script that fetches packages."""

    line: int
    command: str
    packages: tuple[str, ...]
    """Those it installs; empty: it runs them at once."""


def fetches_of(script: str) -> list[Fetch]:
    """Return the commands of a test script that fetch packages.

    Example:
        >>> fetches_of("pip install -q pytest==8.4.1 && pytest")
        [Fetch(line=1, command='pip install', packages=('pytest',))]
    """
    return list(_fetches(script))


def missing_packages(fetches: list[Fetch], said: str) -> str:
    """Return which command failed to fetch what the tests then lacked, by what they said; empty: they lacked nothing."""
    for fetch in fetches:
        if fetch.packages:
            sign = next((sign for package in fetch.packages if (sign := _lack_of(package, said))), "")
        else:
            program = fetch.command.split()[0]
            failed = _NO_PACKAGE_FETCHED.search(said)
            sign = _lack_of(program, said) or (failed[0] if failed else "")
        if sign:
            return f"line {fetch.line}: {fetch.command} needs a network, which containers do not have: {sign.strip()}"
    return ""


def _fetches(script: str) -> Iterator[Fetch]:
    for number, line in enumerate(script.splitlines(), 1):
        if line.lstrip().startswith("#"):
            continue
        if match := _RUNNER.search(f"{line} "):
            yield Fetch(number, " ".join(match[1].split()), ())
        for match in _INSTALL.finditer(f"{line} "):
            packages = tuple(_packages(match[2].split()))
            if packages:
                yield Fetch(number, " ".join(match[1].split()), packages)


def _packages(words: list[str]) -> Iterator[str]:
    takes_file = False
    for word in words:
        match = _PACKAGE.match(word.strip("'\""))
        if not takes_file and match is not None:
            yield match[0]
        takes_file = word in ("-r", "--requirement", "-c", "--constraint", "-i", "--index-url", "-t", "--target")


def _lack_of(package: str, said: str) -> str:
    """Return the words by which Python or a shell says that it has no such module or program."""
    module = re.escape(package).replace(r"\-", "[-_.]")
    found = re.search(rf"No module named '?{module}\b|\b{re.escape(package)}: (?:command )?not found", said)
    return found[0] if found else ""
