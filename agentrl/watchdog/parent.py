"""Notices in a child process that its parent has ended, however it ended.

Invariant: nothing here depends on pipes alone. A pipe to a child stays open as long as any process holds its other end,
such as a pool of processes that a workflow forked.
"""

from __future__ import annotations

import io
import os
import select


def open_parent() -> int | None:
    """Return a descriptor that becomes readable when the parent process ends; None where the system has none.

    Unlike PR_SET_PDEATHSIG it follows the process, not the thread that started this one.
    """
    try:
        return os.pidfd_open(os.getppid())
    except (AttributeError, OSError):  # another system, or a container that forbids it
        return None


class ParentPipe(io.RawIOBase):
    """A pipe from the parent: it also ends when the parent has ended while others still hold its writing end."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor, self._parent = descriptor, open_parent()

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: bytearray | memoryview) -> int:  # pyright: ignore[reportIncompatibleMethodOverride] - no wider buffer comes
        """Read what there is into `buffer`, waiting for the first byte; return 0 at the end."""
        if self._parent is not None:
            ready, _, _ = select.select([self._descriptor, self._parent], [], [])
            if self._descriptor not in ready:
                return 0
        return os.readv(self._descriptor, [buffer])
