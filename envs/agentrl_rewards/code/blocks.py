"""The code in a response: a fenced block, as Markdown has them, or all of it."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Final

_FENCE: Final = re.compile(r"([ \t]*)(`{3,}|~{3,})[ \t]*([^\r\n]*)")
_PYTHON: Final = re.compile(r"\{?\.?(?:python|py|pypy)(?:[23](?:\.\d{1,2})?)?(?![\w-])", re.IGNORECASE)
_LOOKS_LIKE_CODE: Final = re.compile(
    r"^[ \t]*(?:(?:def|class|async def|for|while|if|with|try)\b.*:|(?:import|from)[ \t]+\w|print\(|@\w|\w+[ \t]*=(?!=))",
    re.MULTILINE,
)
_INDENTATION: Final = 3
"""Spaces by which a fence may stand further in than the one that it closes."""


@dataclass(slots=True)
class _Block:
    indentation: str
    fence: str
    language: str
    lines: list[str] = field(default_factory=list[str])

    @property
    def is_python(self) -> bool:
        return _PYTHON.match(self.language) is not None

    @property
    def text(self) -> str:
        return "".join(self.lines)

    def add(self, line: str) -> None:
        """Add a line without the indentation of the fence, as far as it has it."""
        self.lines.append(line[_shared_width(line, self.indentation) :])

    def is_closed_by(self, fence: re.Match[str]) -> bool:
        is_near = len(fence[1].expandtabs()) <= len(self.indentation.expandtabs()) + _INDENTATION
        return is_near and fence[2].startswith(self.fence) and not fence[3].strip()

    def is_left_open_before(self, fence: re.Match[str]) -> bool:
        """Return whether a fence that names Python begins another block, since nothing has closed this one."""
        is_same = fence[2].startswith(self.fence) and len(fence[1]) <= max(len(self.indentation), _INDENTATION)
        return is_same and _PYTHON.match(fence[3]) is not None


def last_code_block(response: str) -> str | None:
    r"""Return the last closed fenced block that names Python; or else the last one without a name that looks like code.

    Where no block without a name looks like code, it is the last of them; None where there is none. A block that is not
    closed is no code: the response was cut off in the middle of its program.
    """
    closed = _closed_blocks(response)
    if named := [block for block in closed if block.is_python]:
        return named[-1].text
    unnamed = [block.text for block in closed if not block.language.strip()]
    return next((text for text in reversed(unnamed) if _LOOKS_LIKE_CODE.search(text)), unnamed[-1] if unnamed else None)


def whole_response(response: str) -> str | None:
    """Return the response itself, for models that write nothing but code."""
    return response or None


def _closed_blocks(response: str) -> list[_Block]:
    closed: list[_Block] = []
    opened: _Block | None = None
    for line in response.splitlines(keepends=True):
        fence = _FENCE.match(line)
        if fence is not None and opened is not None and opened.is_closed_by(fence):
            closed.append(opened)
            opened = None
        elif fence is not None and _opens(fence) and (opened is None or opened.is_left_open_before(fence)):
            opened = _Block(fence[1], fence[2], fence[3])
        elif opened is not None:
            opened.add(line)
    return closed


def _opens(fence: re.Match[str]) -> bool:
    """Return whether a fence can begin a block: a row of backticks with others behind it is code within a line."""
    return "`" not in fence[3] or fence[2][0] == "~"


def _shared_width(line: str, indentation: str) -> int:
    width = 0
    while width < min(len(line), len(indentation)) and line[width] == indentation[width]:
        width += 1
    return width
