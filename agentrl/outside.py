"""What an episode waits for outside the policy: tools, environments, sandboxes, graders and judges.

Invariant: work counts for the episode that began it, in whichever of its tasks and threads. Waits of a workflow's own code
are not seen.
"""

from __future__ import annotations

import math
import time
from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar

import anyio


class OutsideWork:
    """The outside work of one episode."""

    def __init__(self) -> None:
        """Begin with none."""
        self.begun_s = -math.inf
        """When the last work began, seconds of `time.perf_counter`."""
        self._running = 0
        self._cut_at = -math.inf

    def was_running(self, moment: float) -> bool:
        """Return whether a past `moment` of `anyio.current_time`, or a later one, cut work off, or some still runs."""
        return self._running > 0 or self._cut_at >= moment

    @contextmanager
    def counted(self) -> Generator[None]:
        """Count the block as work."""
        self._running += 1
        self.begun_s = time.perf_counter()
        try:
            yield
        except BaseException:
            self._cut_at = max(self._cut_at, loop_time())
            raise
        finally:
            self._running -= 1


_work: ContextVar[OutsideWork | None] = ContextVar("agentrl_outside_work", default=None)


@contextmanager
def watch_outside_work() -> Generator[OutsideWork]:
    """Yield the outside work of the block, and of the tasks and threads that it starts."""
    work = OutsideWork()
    token = _work.set(work)
    try:
        yield work
    finally:
        _work.reset(token)


@contextmanager
def outside_work() -> Generator[None]:
    """Count the block as outside work of the running episode, where there is one."""
    work = _work.get()
    if work is None:
        yield
        return
    with work.counted():
        yield


def loop_time() -> float:
    """Return `anyio.current_time()`; in a thread without an event loop, a time before all others."""
    try:
        return anyio.current_time()
    except RuntimeError:
        return -math.inf
