"""Names code that blocks the event loop of a script or a notebook, and ends nothing."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager

from agentrl.watchdog.delays import BEAT_S, LOOK_S, NAME_AFTER_S, LoopDelays, current_delays, under_asyncio
from agentrl.watchdog.waits import ProcessorWaits


@contextmanager
def blocks_named() -> Generator[None]:
    """Warn of the user's code that blocks the event loop in the block, each function once.

    Inside `watched_loop`, which warns itself, and under trio, this does nothing.
    """
    if current_delays.get() is not None or not under_asyncio():
        yield
        return
    beats = _Beats()
    thread = threading.Thread(target=beats.watch, name="agentrl heartbeat", daemon=True)
    thread.start()
    outer = current_delays.set(beats.delays)
    try:
        yield
    finally:
        current_delays.reset(outer)
        beats.stop()
        thread.join()


@contextmanager
def coroutines_traced() -> Generator[None]:
    """Let Python's warning of a coroutine that nothing awaited name the line that made it."""
    before = sys.get_coroutine_origin_tracking_depth()
    sys.set_coroutine_origin_tracking_depth(max(before, 2))  # the caller of `create`, and the one above it
    try:
        yield
    finally:
        sys.set_coroutine_origin_tracking_depth(before)


class _Beats:
    """`_beat` runs on the loop, `watch` in a thread."""

    def __init__(self) -> None:
        self.delays = LoopDelays()
        self._waits = ProcessorWaits()
        self._thread_id = threading.get_ident()
        self._loop = asyncio.get_running_loop()
        self._left = threading.Event()
        self._count = 0
        self._beat()

    def stop(self) -> None:
        """End both."""
        self._left.set()
        self._timer.cancel()

    def watch(self) -> None:
        """Name code that keeps the loop from its beats, until `stop`."""
        seen, since, waited, is_named = -1, 0.0, 0.0, False
        while not self._left.wait(LOOK_S):
            if self._count != seen:
                seen, since, waited, is_named = self._count, time.monotonic(), self._waits.seconds(), False
            elif not is_named and time.monotonic() - since - (self._waits.seconds() - waited) >= NAME_AFTER_S:
                self.delays.name(self._thread_id)
                is_named = True

    def _beat(self) -> None:
        self._count += 1
        self._timer = self._loop.call_later(BEAT_S, self._beat)
