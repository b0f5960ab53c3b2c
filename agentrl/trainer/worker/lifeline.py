"""The stream from the driver as a rank reads it: it ends this process when the driver goes, also inside a collective.

Invariant: a thread always reads, so the end of the stream is noticed at once, whatever the main thread does. A rank whose
driver is gone ends without a word to the other ranks: they have lifelines of their own.
"""

from __future__ import annotations

import io
import os
import queue
import threading
from collections.abc import Generator
from contextlib import contextmanager, suppress
from typing import BinaryIO, Literal

from agentrl.trainer.worker import protocol

Ending = Literal["at once", "when idle", "when dismissed"]
"""What the end of the stream means. `at once`: this process ends, always. `when idle`: between two requests it is the end of
input, and within one the death of the driver. `when dismissed`: the death of the driver, unless it dismissed this rank."""
_MAX_WAITING = 4
"""Frames that wait for the main thread."""


class Lifeline(io.RawIOBase):
    """The frames of the driver, read by a thread.

    A header without a body dismisses this rank.
    """

    def __init__(self, source: BinaryIO, *, ends: Ending) -> None:
        """Start to read `source`, a buffered stream; `ends` says what its end means."""
        self._source, self._ends = source, ends
        self._frames: queue.Queue[bytes] = queue.Queue(_MAX_WAITING)
        self._rest = b""
        self._lock = threading.Lock()
        self._busy = False
        self._broken = False
        self._thread = threading.Thread(target=self._read, name="agentrl lifeline", daemon=True)
        self._thread.start()

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: bytearray | memoryview) -> int:  # pyright: ignore[reportIncompatibleMethodOverride] - no wider buffer comes
        """Read what there is into `buffer`, waiting for the next frame; return 0 at the end."""
        if not self._rest:
            self._rest = self._frames.get()
            if not self._rest:
                self._frames.put(b"")  # a later read finds the end too
                return 0
        count = min(len(buffer), len(self._rest))
        buffer[:count] = self._rest[:count]
        self._rest = self._rest[count:]
        return count

    @contextmanager
    def working(self) -> Generator[None]:
        """Mark the block as work on a request, which ends with the driver."""
        with self._lock:
            self._busy = True
            if self._broken:
                os._exit(1)
        try:
            yield
        finally:
            with self._lock:
                self._busy = False

    def wait(self) -> None:
        """Wait until the driver ends this process."""
        self._thread.join()

    def _read(self) -> None:
        dismissed = False
        with suppress(OSError):  # a driver that is killed with unread replies resets its connection: the end of the stream
            while header := self._source.read(protocol.HEADER_BYTES):
                if header == protocol.HEARTBEAT:
                    if self._ends == "at once":
                        os._exit(0)
                    dismissed = True
                length = protocol.announced_length(header)
                # What is no frame goes to the main thread, which raises the error.
                body = self._source.read(length) if length <= protocol.MAX_FRAME_BYTES else b""
                self._frames.put(header + body)
        if dismissed:
            os._exit(0)
        with self._lock:
            self._broken = True
            if self._busy or self._ends != "when idle":
                os._exit(1)
        self._frames.put(b"")
