"""Who may use the processor: the answer that a reader waits for comes before a search.

Invariant: a search waits between two records while a request is being answered. Both decode JSON in threads of one process,
where each would hold up the other many times; a search can wait, and a reader who opens an episode cannot.
"""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import contextmanager


class ReadersFirst:
    """Counts the requests that are being answered; any thread may use it."""

    def __init__(self) -> None:
        self._readers = 0
        self._changed = threading.Condition()

    @contextmanager
    def reading(self) -> Generator[None]:
        """Hold up searches inside the block."""
        self._add(1)
        try:
            yield
        finally:
            self._add(-1)

    def wait_until_free(self, stop: threading.Event) -> bool:
        """Wait until nothing is being read; return False after `stop`, which ends the search."""
        with self._changed:
            self._changed.wait_for(lambda: self._readers == 0 or stop.is_set())
        return not stop.is_set()

    def _add(self, count: int) -> None:
        with self._changed:
            self._readers += count
            self._changed.notify_all()
