"""Processes by their id, also those of others."""

from __future__ import annotations

import os
from pathlib import Path

import anyio


def is_running(pid: int) -> bool:
    """Return whether a process exists and has not ended; one that nobody has reaped counts as ended."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


async def until_ended(pid: int) -> None:
    """Wait until a process has ended, at most 10 seconds."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        with anyio.fail_after(10):
            await anyio.wait_readable(descriptor)
    finally:
        os.close(descriptor)
