"""Delays of the event loop: their seconds, the user's code that caused them, and the garbage collector, which causes few.

Invariant: only code of the user is named, each function once; time counts whatever code it was. Nothing is ended. An import
sets nothing, and a block restores what it set.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import sys
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

from agentrl.processes.watchdog.stacks import user_place

logger = logging.getLogger(__name__)

LOOP_BEAT_S = 0.05
"""Seconds between two beats of a running loop."""
LOOK_S = 0.05
"""Seconds between two looks of a thread at the beats."""
NAME_AFTER_S = 0.2
"""Seconds without a beat of the loop from which a block counts."""
THRESHOLDS = (20_000, 10, 10)
"""New objects per collection of the youngest generation; such collections per one of the second; those per full one."""
_FROZEN_AT_START = 1_000
"""More objects than an interpreter has frozen by itself; Python 3.12 starts with some hundred."""


class ProcessorWaits:
    """The waits of one thread for a processor; None: of the thread that makes this object."""

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


class LoopDelays:
    """The blocks of one watched loop."""

    def __init__(self) -> None:
        self.blocked_s = 0.0
        """Seconds in which the loop did not run, over all blocks of at least `NAME_AFTER_S`."""
        self._named: set[str] = set()

    def count(self, late_s: float) -> None:
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
    """Return the seconds so far for which code has blocked the watched loop around this task."""
    delays = current_delays.get()
    return 0.0 if delays is None else delays.blocked_s


def under_asyncio() -> bool:
    """Return whether an asyncio loop runs in this thread."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


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
        self._timer = self._loop.call_later(LOOP_BEAT_S, self._beat)


@contextmanager
def tuned_garbage_collector() -> Generator[None]:
    """Collect rarely, and pass over what is alive when the block begins; enter it when all is loaded and started.

    Each pass stops every episode (`benchmarks/garbage_collector.py`). A process that has frozen objects or set higher
    thresholds keeps its settings.
    """
    thresholds = gc.get_threshold()
    freezes = gc.get_freeze_count() < _FROZEN_AT_START
    gc.collect()
    if freezes:
        gc.freeze()
    gc.set_threshold(*map(max, thresholds, THRESHOLDS))
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        if freezes:
            gc.unfreeze()
