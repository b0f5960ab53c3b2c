"""The scripts of tasks: how they are run, and what they said."""

from __future__ import annotations

from typing import Final

from agentrl_sandbox.types import Result

LAST_CHARS: Final = 600
"""Characters of a program's output in a message."""


def script_argv(path: str) -> list[str]:
    """Return the command that runs a script of a task by its first line, as Harbor does; bash runs one that names none."""
    return ["/bin/bash", "-c", 'chmod +x "$0" && exec "$0"', path]


def end_of_output(result: Result) -> str:
    """Return the last words of a program, for a message."""
    return result.text[-LAST_CHARS:] or "(nothing)"
