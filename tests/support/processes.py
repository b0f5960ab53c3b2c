"""Processes by their id, also those of others."""

from __future__ import annotations

import os

import anyio


async def until_ended(pid: int) -> None:
    """Wait until a process has ended, at most a minute."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        with anyio.fail_after(60):
            await anyio.wait_readable(descriptor)
    finally:
        os.close(descriptor)
