"""Which commands of a Dockerfile need a network, as far as their words tell."""

from __future__ import annotations

import re
from typing import Final

_OPTIONS: Final = r"(?:\s+-\S+(?:\s+[A-Za-z:]+[=:]+\S+)?)*"
"""Options between a program and what it is to do, such as `-y` and `-o Acquire::Retries=3`."""
_ANYTHING: Final = r"(?!\d?[<>])[^\s;&|)]\S*"
_ASKS: Final = {
    r"apt-get|apt|aptitude": r"update|install|upgrade|dist-upgrade|full-upgrade|build-dep|source|download|satisfy",
    r"apk": r"add|update|upgrade|fetch",
    r"dnf|yum|microdnf|zypper|tdnf": _ANYTHING,
    r"pacman": r"-S\S*",
    r"pip3?(?:\.\d+)?|pipx": r"install|download|wheel|inject|run",
    r"uv": r"pip|add|sync|tool|run|python|lock",
    r"poetry|pdm|pipenv|bundle|composer": r"install|add|update|sync|require|lock",
    r"npm|pnpm|yarn|bun": r"install|i|ci|add|update|exec|dlx|global",
    r"npx|bunx|add-apt-repository|apt-key|curl|wget|rustup|nvm|ftp|scp|rsync": _ANYTHING,
    r"git": r"clone|fetch|pull|submodule|ls-remote",
    r"cargo": r"install|fetch|add|update",
    r"go": r"get|install|mod",
    r"gem|luarocks|opam": r"install|update",
    r"conda|mamba|micromamba": r"install|create|update|env",
    r"cpanm?|cabal|stack": _ANYTHING,
    r"playwright|corepack|deno": r"install|prepare|enable|cache",
}
_BEFORE: Final = r"(?:^|[\s;&|(`'\"/])"
_AFTER: Final = r"(?:[\s;&|)'\"]|$)"
_NEEDS: Final = re.compile(
    "|".join(rf"(?:{_BEFORE}({program}){_OPTIONS}\s+(?:{asks}){_AFTER})" for program, asks in _ASKS.items())
    + r"|(install\.packages|BiocManager::install|(?:remotes|devtools)::install_\w+)\(|\b(sdkmanager)\s"
)
_STAYS_HERE: Final = re.compile(
    r"(?:curl|wget)\s[^;&|\n]*(?:--version|localhost|127\.0\.0\.1)|pip3?\s[^;&|\n]*--no-index|--version\b|echo\s+(?:'[^']*'|\"[^\"]*\")"
)
"""Calls of such programs that reach nothing outside of the container, and texts that are only printed."""


def program_with_network(command: str) -> str:
    """Return the program of a command that needs a network, as far as its words tell; empty: none does.

    Example:
        >>> program_with_network("apt-get -y update && apt-get clean"), program_with_network("apt-get clean")
        ('apt-get', '')
    """
    match = _NEEDS.search(_STAYS_HERE.sub(" ", command))
    if match is None:
        return ""
    return next(name for name in match.groups() if name)
