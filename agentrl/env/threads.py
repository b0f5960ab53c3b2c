"""Plain functions in threads, so that a slow tool or environment delays no other episode.

Invariant: a cancelled call returns at once. Its thread cannot be ended: the event loop counts it as abandoned until the
function returns, and refuses further calls when too many threads are abandoned.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable
from typing import Final, Generic, TypeVar

import anyio
import anyio.to_thread
from anyio.lowlevel import RunVar

from agentrl.errors import EnvironmentFault

MAX_THREADS: Final = 64
"""Calls in threads at the same time, in one event loop; further calls wait. `anyio.to_thread` has other threads."""
MAX_ABANDONED: Final = 64
"""Abandoned calls in one event loop before further calls are refused a thread."""

Result = TypeVar("Result")
logger = logging.getLogger(__name__)


async def call_in_thread(function: Callable[[], Result], what: str) -> Result:
    """Return what `function` returns in a thread, which sees a copy of the caller's context variables.

    `what` names it, such as `tool search`. With `MAX_ABANDONED` cancelled calls that still run, it is an EnvironmentFault.

    Cancellation: returns at once; the function continues in its thread, which a warning names, and its result is lost.
    """
    threads = _threads_of_this_loop()
    async with threads.limiter:
        threads.check_room(what)
        call = _ThreadCall(function, what, threads)
        try:
            await anyio.to_thread.run_sync(call.run, abandon_on_cancel=True, limiter=anyio.CapacityLimiter(1))
        except anyio.get_cancelled_exc_class():
            if call.abandon():
                logger.warning(
                    "%s still runs in its thread after its call was cancelled, and nothing can end it; %d such calls run: "
                    "%s. Give what it waits for a timeout, or run it in a process: a tool with run_in='process', an "
                    "environment behind agentrl_envs.http",
                    what,
                    threads.num_abandoned(),
                    threads.describe_abandoned(),
                )
            raise
    return call.result()


class _Threads:
    """The threads of one event loop. The lock guards what threads and loop both change."""

    def __init__(self) -> None:
        self.limiter = anyio.CapacityLimiter(MAX_THREADS)
        self.lock = threading.Lock()
        self.abandoned: list[str] = []

    def num_abandoned(self) -> int:
        with self.lock:
            return len(self.abandoned)

    def describe_abandoned(self) -> str:
        with self.lock:
            counts = Counter(self.abandoned).most_common(8)
        return ", ".join(f"{name} ({count})" for name, count in counts)

    def check_room(self, what: str) -> None:
        if self.num_abandoned() >= MAX_ABANDONED:
            raise EnvironmentFault(
                f"{what} gets no thread: {MAX_ABANDONED} cancelled calls still run: {self.describe_abandoned()}; give what "
                "they wait for a timeout, or run them in processes"
            )


class _ThreadCall(Generic[Result]):
    """One call; `run` is for the thread, the other methods are for the event loop."""

    def __init__(self, function: Callable[[], Result], what: str, threads: _Threads) -> None:
        self._function, self._what, self._threads = function, what, threads
        self._running = self._cancelled = False
        self._value: list[Result] = []
        self._error: BaseException | None = None

    def run(self) -> None:
        with self._threads.lock:
            if self._cancelled:
                return
            self._running = True
        thread = threading.current_thread()
        usual_name, thread.name = thread.name, f"agentrl {self._what}"
        try:
            self._value.append(self._function())
        except BaseException as error:  # noqa: BLE001 - `result` raises it in the event loop
            self._error = error
        finally:
            thread.name = usual_name
            with self._threads.lock:
                self._running = False
                if self._cancelled:
                    self._threads.abandoned.remove(self._what)

    def abandon(self) -> bool:
        with self._threads.lock:
            self._cancelled = True
            if self._running:
                self._threads.abandoned.append(self._what)
            return self._running

    def result(self) -> Result:
        if self._error is not None:
            raise self._error
        return self._value[0]


_loop_threads: RunVar[_Threads] = RunVar("agentrl_threads")


def _threads_of_this_loop() -> _Threads:
    try:
        return _loop_threads.get()
    except LookupError:
        threads = _Threads()
        _loop_threads.set(threads)
        return threads
