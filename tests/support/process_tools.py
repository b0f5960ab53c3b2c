"""Functions that run in worker processes, each with a name that a worker can import."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from threading import Event

from agentrl.client.tools import ToolError, tool

COUNTER = [0]


def add(a: int, b: int) -> int:
    return a + b


def announce_and_hang(pipe: str) -> None:
    with Path(pipe).open("w") as file:
        file.write(str(os.getpid()))
    Event().wait()


def refuse() -> None:
    raise ToolError("not today")


async def wait() -> None: ...


@tool(run_in="process", timeout=30)
def factor(number: int, *, limits: list[int] | None = None) -> dict[str, object]:
    """Split a number."""
    if number < 1:
        raise ToolError("the number must be positive")
    if number == 13:
        raise OSError("bad luck")
    return {"number": number, "limits": limits, "process": os.getpid()}


@tool(run_in="process", timeout=0.3)
def stuck() -> None:
    """Never return."""
    Event().wait()


def exhaust() -> int:
    """Run out of memory."""
    raise MemoryError


def start_program_and_hang(pipe: str) -> None:
    """Start a program that holds `pipe` open, and hang."""
    with Path(pipe).open("w") as file, subprocess.Popen(["sleep", "600"], stdout=file):
        Event().wait()
