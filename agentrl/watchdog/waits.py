"""Time for which a thread wanted to run, and the machine was busy with others: no code of the thread is to blame for it."""

from __future__ import annotations

import threading
from pathlib import Path


class ProcessorWaits:
    """The waits of one thread for a processor.

    Args:
        thread: native id of the thread; None: the thread that makes this object.
    """

    def __init__(self, thread: int | None = None) -> None:
        native = threading.get_native_id() if thread is None else thread
        self._file = Path(f"/proc/self/task/{native}/schedstat")

    def seconds(self) -> float:
        """Return the seconds so far, from the start of the thread; 0 where the system does not count them."""
        try:
            # Nanoseconds on a processor, nanoseconds of waiting for one, and the number of time slices.
            return int(self._file.read_text().split()[1]) / 1e9
        except (OSError, IndexError, ValueError):
            return 0.0
