"""The processes that carry a mark in their environment: children of a program that left its group are found by it.

Invariant: only a process whose own environment holds the mark is signalled; no other process has this secret by chance.
"""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Final

import anyio

_ROUNDS: Final = 50
"""Sweeps at most; a process that forks as fast as it is swept is left after them."""
_PAUSE_S: Final = 0.02


def marked_processes(mark: bytes) -> list[int]:
    """Return the ids of the running processes of this machine whose environment holds `mark`."""
    found: list[int] = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal() and int(folder.name) != os.getpid():
            with suppress(OSError):  # it has ended, or is another user's
                if mark in (folder / "environ").read_bytes():
                    found.append(int(folder.name))
    return found


async def end_marked(mark: bytes) -> int:
    """Kill the processes that carry `mark`, and those that they start meanwhile; return how many live on."""
    found: list[int] = []
    for _ in range(_ROUNDS):
        found = marked_processes(mark)
        if not found:
            break
        for pid in found:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        await anyio.sleep(_PAUSE_S)
    return len(found)
