"""The order of events in one episode.

Invariant: every request that is sent and every turn reward that is set has a number of its own, and a later one has a larger
number. Seconds would not do: two events may share one.
"""

from __future__ import annotations


class EventClock:
    """Numbers the events of one episode, from 0.

    Example:
        >>> clock = EventClock()
        >>> clock.tick(), clock.tick()
        (0, 1)
    """

    __slots__ = ("_count",)

    def __init__(self) -> None:
        """Start before the first event."""
        self._count = 0

    def tick(self) -> int:
        """Return the number of the event that happens now."""
        self._count += 1
        return self._count - 1
