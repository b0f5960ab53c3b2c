"""Virtual time: a queue of events.

Invariant: time never runs backwards, and events of the same moment happen in the order in which they were planned.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count


class EventQueue:
    """Events in the order of their times.

    Example:
        >>> seen: list[str] = []
        >>> events = EventQueue()
        >>> events.plan(2.0, lambda: seen.append("second")); events.plan(1.0, lambda: seen.append("first"))
        >>> events.run_next(), events.run_next(), events.run_next(), events.now, seen
        (True, True, False, 2.0, ['first', 'second'])
    """

    def __init__(self) -> None:
        self.now = 0.0
        """Virtual seconds since the start."""
        self._planned: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()

    def plan(self, delay_s: float, action: Callable[[], None]) -> None:
        """Run `action` in `delay_s` virtual seconds."""
        heapq.heappush(self._planned, (self.now + delay_s, next(self._numbers), action))

    def run_next(self) -> bool:
        """Move to the next event and run it; return False where there is none."""
        if not self._planned:
            return False
        self.now, _, action = heapq.heappop(self._planned)
        action()
        return True
