"""Short blocks of the event loop: how much time they took in all, and which of the user's code they were.

Invariant: only code of the user is named, each function once. Time is counted whatever code it was.
"""

from __future__ import annotations

import asyncio
import logging
from contextvars import ContextVar

from agentrl.watchdog.stacks import user_place

logger = logging.getLogger(__name__)

BEAT_S = 0.05
"""Seconds between two beats of a running loop."""
LOOK_S = 0.05
"""Seconds between two looks of a thread at the beats."""
NAME_AFTER_S = 0.2
"""Seconds without a beat of the loop from which a block counts."""


class LoopDelays:
    """The blocks of one watched loop."""

    def __init__(self) -> None:
        """Begin without any."""
        self.blocked_s = 0.0
        """Seconds in which the loop did not run, over all blocks of at least `NAME_AFTER_S`."""
        self._named: set[str] = set()

    def count(self, late_s: float) -> None:
        """Count a beat that came `late_s` seconds late."""
        if late_s >= NAME_AFTER_S:
            self.blocked_s += late_s

    def name(self, thread_id: int) -> None:
        """Warn of the user's code that blocks the loop of a thread now, unless it was named before."""
        place = user_place(thread_id)
        if place is None or place[0] in self._named:
            return
        function, line = place
        self._named.add(function)
        logger.warning(
            "every episode waits for this code, which has kept the event loop from running for %g s: %s. Await it, or run "
            "it elsewhere with anyio.to_thread.run_sync",
            NAME_AFTER_S,
            line,
        )


current_delays: ContextVar[LoopDelays | None] = ContextVar("agentrl_loop_delays", default=None)
"""Of the watched loop around the present task; None where nothing is watched."""


def loop_blocked_s() -> float:
    """Return the seconds for which code has blocked the watched loop around the present task so far."""
    delays = current_delays.get()
    return 0.0 if delays is None else delays.blocked_s


def under_asyncio() -> bool:
    """Return whether an asyncio loop runs in this thread."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
