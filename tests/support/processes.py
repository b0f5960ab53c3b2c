"""Processes by their id, also those of others."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from socket import inet_ntoa

import anyio


async def until_ended(pid: int) -> None:
    """Wait until a process has ended, at most a minute."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        with anyio.fail_after(300):
            await anyio.wait_readable(descriptor)
    finally:
        os.close(descriptor)


def listening_addresses(pid: int) -> set[str]:
    """Return the addresses of this machine at which the TCP sockets of a process listen; those of IPv6 in hexadecimal."""
    sockets: set[str] = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            sockets.add(os.readlink(descriptor).removeprefix("socket:[").removesuffix("]"))
    found: set[str] = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in sockets:
                address = fields[1].partition(":")[0]
                found.add(inet_ntoa(bytes.fromhex(address)[::-1]) if table == "tcp" else address)
    return found
