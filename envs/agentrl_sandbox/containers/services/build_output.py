"""What an engine says while it builds an image: how far it is, and its last lines.

Invariant: of an output of any length a few lines are kept, each cut.
"""

from __future__ import annotations

import re
from collections import deque
from typing import Final

_LINES: Final = 20
_LINE_CHARS: Final = 300
_STEP: Final = re.compile(
    r"^(?:Step \d+/\d+ : .+|(?:\[\d+/\d+\] )?STEP \d+(?:/\d+)?: .+|#\d+ (\[(?!internal)[^\]]*?\d+/\d+\] .+))$", re.IGNORECASE
)
"""How the classic builder, podman and BuildKit announce an instruction."""
_NOISE: Final = re.compile(r"#\d+ (?:sha256:|DONE\b|CACHED\b|transferring |\[internal\])")
"""What BuildKit says of its own work."""
_COLOURS: Final = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_HINTS: Final = (
    (
        r"unknown instruction|failed to parse",
        "; where the line belongs to a here-document, this engine's builder reads none: take a newer one, begin the file "
        "with `# syntax=docker/dockerfile:1`, or set `build: steps` in `containers`",
    ),
    (
        r"network \S+ not found|unable to find network|failure resolving|could not resolve|network is unreachable",
        "; `build_network` in `containers` names another network for builds, such as host",
    ),
    (
        r"no space left on device|disk quota exceeded",
        "; free the engine's disk: its images of earlier tasks go with `image prune --all --filter label=agentrl=task`",
    ),
    (
        r"cgroups in hybrid mode",
        "; another runtime may do it, such as `runtime: runc` in `containers`",
    ),
    (
        r"secret \S+: not found|secret required|no such secret|ssh agent|denied: requested access|authentication required",
        "; a build gets no secrets and no keys: log the engine in, or build the image by hand and name it as "
        "environment.docker_image",
    ),
)


class BuildOutput:
    """Follows the output of one build."""

    def __init__(self) -> None:
        self._lines: deque[str] = deque(maxlen=_LINES)
        self._open = b""
        """The beginning of a line whose end has not come yet."""
        self.step = ""
        """The instruction that the engine announced last; empty: none yet."""

    def take(self, piece: bytes) -> None:
        """Take the next bytes."""
        *lines, self._open = re.split(rb"[\r\n]", self._open[: 4 * _LINE_CHARS] + piece)
        for line in lines:
            self._take_line(line)

    def _take_line(self, raw: bytes) -> None:
        line = _COLOURS.sub("", raw[: 4 * _LINE_CHARS].decode(errors="replace")).strip()[:_LINE_CHARS]
        if not line or _NOISE.match(line):
            return
        self._lines.append(line)
        if (match := _STEP.match(line)) is not None:
            self.step = match[1] or line

    def last_lines(self) -> str:
        """Return the last lines, and what may help where they tell."""
        lines = [*self._lines]
        if last := self._open[: 4 * _LINE_CHARS].decode(errors="replace").strip()[:_LINE_CHARS]:
            lines.append(last)
        return "\n".join(f"  {line}" for line in lines[-_LINES:]) or "  (nothing)"

    def hint(self) -> str:
        """Return what to do, where the last lines tell."""
        said = "\n".join(self._lines)
        return next((fix for pattern, fix in _HINTS if re.search(pattern, said, re.IGNORECASE)), "")
