"""The signs of life of one trainer rank, and what shows that a silent process works all the same.

Invariant: silence is counted in waits, so that a driver which was stopped itself takes no rank for dead.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import anyio

TICK_S = 1.0
"""Seconds of one wait, at most."""
_STATE, _USER_TICKS, _SYSTEM_TICKS = 0, 11, 12
"""Fields of /proc/PID/stat after the name of the program."""


class LifeSigns:
    """The heartbeats and replies of one rank."""

    def __init__(self) -> None:
        """Start before the first sign."""
        self.have_begun = False
        """Whether there has been one."""
        self._next = anyio.Event()

    def note(self) -> None:
        """Take note of a sign."""
        self.have_begun = True
        sign, self._next = self._next, anyio.Event()
        sign.set()

    async def come_within(self, seconds: float) -> bool:
        """Wait for the next sign; return whether it came within `seconds`.

        Cancellation: nothing is left behind.
        """
        sign = self._next
        with anyio.move_on_after(seconds):
            await sign.wait()
        return sign.is_set()  # perhaps together with the end of the wait


def pulse(pid: int) -> int | None:
    """Return a number that grows while a process of this machine works; None: it is stopped, or cannot be seen.

    A process that holds the interpreter while it reads or writes a file sends no heartbeat, and is no dead one.
    """
    with suppress(OSError, ValueError, IndexError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        if fields[_STATE] not in "TtZX":
            return int(fields[_USER_TICKS]) + int(fields[_SYSTEM_TICKS]) + _bytes_moved(pid)
    return None


def _bytes_moved(pid: int) -> int:
    with suppress(OSError, ValueError):
        lines = (line.split(": ") for line in Path(f"/proc/{pid}/io").read_text().splitlines())
        return sum(int(number) for name, number in lines if name in ("rchar", "wchar", "read_bytes", "write_bytes"))
    return 0
