"""Virtual time: a queue of events, and the processor cores that driver, servers and trainer of one machine share.

Invariant: time never runs backwards, and events of the same moment happen in the order in which they were planned.

Threads that want to compute share the cores equally, so each runs at the same speed: 1 while there are as many cores as
threads, else cores / threads. One number, the work of a job present from the beginning, tells when each job ends. Parts with
devices of their own, such as GPUs, always run at speed 1.
"""

from __future__ import annotations

import heapq
from collections import deque
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


class SharedCores:
    """Runs jobs, and tells servers at which speed they sample; `cores` None: there is no limit."""

    def __init__(self, events: EventQueue, cores: int | None) -> None:
        self._events, self._cores = events, cores
        self._jobs: list[tuple[float, int, int, Callable[[], None]]] = []
        self._numbers = count()
        self._plan = 0
        self._work = self._now = 0.0
        self._serving = self._working = 0
        """Threads of busy servers, and of jobs."""
        self.speed = 1.0
        """Of every thread that computes, as a share of a core of its own."""
        self.used_s = 0.0
        """Core seconds that threads have computed."""
        self.on_speed: Callable[[], None] = lambda: None

    def set_serving(self, threads: int) -> None:
        """Record how many threads of servers compute."""
        self.advance()
        self._serving = threads
        self._share()

    def run(self, work_s: float, threads: int, on_end: Callable[[], None]) -> None:
        """Compute for `work_s` seconds at speed 1 on `threads` threads, then call `on_end`."""
        self.advance()
        self._working += threads
        heapq.heappush(self._jobs, (self._work + work_s, next(self._numbers), threads, on_end))
        self._share()

    def advance(self) -> None:
        done = (self._events.now - self._now) * self.speed
        self._work += done
        self.used_s += done * (self._serving + self._working)
        self._now = self._events.now

    def _share(self) -> None:
        threads = self._serving + self._working
        speed = 1.0 if self._cores is None or threads <= self._cores else self._cores / threads
        changed, self.speed = speed != self.speed, speed
        self._plan += 1
        if self._jobs:
            plan = self._plan
            self._events.plan(max(0.0, self._jobs[0][0] - self._work) / speed, lambda: self._end(plan))
        if changed:
            self.on_speed()

    def _end(self, plan: int) -> None:
        if plan != self._plan:
            return  # something has changed since
        self.advance()
        ends_at, _, threads, on_end = heapq.heappop(self._jobs)
        self._work = max(self._work, ends_at)
        self._working -= threads
        self._share()
        on_end()


class SimulatedDriver:
    """The driver's event loop: one thread, one piece of work after another."""

    def __init__(self, cores: SharedCores) -> None:
        self._cores = cores
        self._queue: deque[tuple[float, Callable[[], None]]] = deque()
        self.busy_s = 0.0
        """Processor seconds of what has ended."""

    def run(self, work_s: float, on_end: Callable[[], None]) -> None:
        """Do `work_s` processor seconds of work after what waits already, then call `on_end`; 0 only waits its turn."""
        if not work_s and not self._queue:
            on_end()
            return
        self._queue.append((work_s, on_end))
        if len(self._queue) == 1:
            self._begin()

    def _begin(self) -> None:
        work_s, on_end = self._queue[0]
        self._cores.run(work_s, 1, lambda: self._end(work_s, on_end))

    def _end(self, work_s: float, on_end: Callable[[], None]) -> None:
        self._queue.popleft()
        self.busy_s += work_s
        if self._queue:
            self._begin()
        on_end()
