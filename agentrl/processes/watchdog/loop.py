"""The event loop's heartbeat: a thread names and interrupts code that blocks the loop or ignores its cancellation.

Invariant: inside `watched_loop`, a loop that does not run is reported and ended. The loop stamps the time, and a thread
reads the stamps, because every deadline and cancellation of a run needs the loop.

A workflow that catches every exception cannot be ended from within the process. Where it keeps an ending command alive, the
process prints the code and exits; trainer and servers end with their driver.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from contextlib import asynccontextmanager, contextmanager
from types import FrameType
from typing import Any, TypeVar

import anyio

from agentrl.errors import RunStopped, StallError
from agentrl.processes.watchdog.delays import (
    LOOK_S,
    LOOP_BEAT_S,
    NAME_AFTER_S,
    LoopDelays,
    ProcessorWaits,
    current_delays,
    under_asyncio,
)
from agentrl.processes.watchdog.signals import (
    EXIT_GRACE_S,
    TERMINATING,
    Ending,
    exit_process,
    interrupt_from,
    run_without_waiting,
)
from agentrl.processes.watchdog.stacks import blocking_code, indented, is_in_user_code, workflow_code
from agentrl.support.concurrency import STRAY_CANCELLATION, stray_cancellation_raises

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

STALL_TIMEOUT_S = 900.0
"""Seconds the loop may be blocked where no run file sets `engine.stall_timeout_s`."""
WARN_AFTER_S = 10.0
"""Seconds without a beat before the first warning; each later warning comes after twice as many."""
IGNORING_S = 0.5
"""Seconds between two looks at the tasks that ignore their cancellation."""
UNRESPONSIVE_S = 1.0
"""Seconds without a beat after which the loop will not see a cancellation, so the blocking code is interrupted instead."""
REPEAT_S = 5.0
"""Seconds after an interrupt in which further interrupts change nothing, because the command is already ending."""
_STOPPED_S = 0.5
"""Seconds between two looks of the thread beyond which the process was stopped."""
_INTERRUPT = signal.SIGURG
"""Interrupts blocking code. Programs ignore it by default, so a late one does no harm."""
_EPISODES = ("agentrl.rollout.", "agentrl.engine.evaluate.")
"""Prefixes of the names of agentrl's tasks that run workflows."""
_BLOCKING_ADVICE = (
    "A workflow that computes or waits without await stops every episode; await it, or move it off the loop with "
    "anyio.to_thread.run_sync."
)
_IGNORING_ADVICE = (
    "An `except:` or `except BaseException` around an await swallows cancellation (catch Exception); a thread cannot be "
    "interrupted (give what runs in it a timeout)."
)


def run_watched(
    job: Callable[[], Awaitable[Result]],
    *,
    stall_timeout_s: float = STALL_TIMEOUT_S,
    on_exit: Callable[[Ending], str] | None = None,
) -> Result:
    """Run an async job inside `watched_loop` on a new event loop, and return its result; raises as `watched_loop`."""

    async def watched() -> Result:
        async with watched_loop(stall_timeout_s, on_exit=on_exit):
            return await job()

    return run_without_waiting(watched)


class WatchedBlock:
    """A block inside `watched_loop`."""

    def __init__(self, watch: _Watch | None) -> None:
        self._watch = watch

    @contextmanager
    def ends_first(self) -> Generator[None]:
        """Make a signal or a stall end this block alone, and the rest of the watched block after it has ended."""
        if self._watch is None:
            yield
            return
        with self._watch.narrowed():
            yield


@asynccontextmanager
async def watched_loop(
    stall_timeout_s: float,
    *,
    warn_after_s: float = WARN_AFTER_S,
    on_exit: Callable[[Ending], str] | None = None,
    processor_wait_s: Callable[[], float] | None = None,
) -> AsyncGenerator[WatchedBlock]:
    """Watch the event loop while the block runs.

    SIGINT, and SIGTERM and SIGHUP where they have a handler, cancel the block; blocking code is interrupted so that the loop
    can cancel it. Ignored signals stay ignored. Outside the main thread and under trio, nothing is watched.

    Args:
        stall_timeout_s: seconds the loop may be blocked, and seconds a workflow may run on after its cancellation.
        warn_after_s: seconds before the first warning is logged.
        on_exit: lets the process exit as a whole. Called in another thread, with what ends the block, when a workflow has
            kept the block alive for `EXIT_GRACE_S` seconds; saves the results and returns where they are.
        processor_wait_s: the seconds for which this thread has waited for a busy machine; None: the system's count.

    Raises:
        StallError: code blocked the loop, or ignored its cancellation, for `stall_timeout_s`; the message names the code.
        KeyboardInterrupt: a signal arrived; `Terminated` for SIGTERM and SIGHUP.
        RunStopped: code inside the block cancelled the task of the block.
    """
    if threading.current_thread() is not threading.main_thread() or not under_asyncio():
        yield WatchedBlock(None)
        return
    watch = _Watch(stall_timeout_s, warn_after_s, on_exit, processor_wait_s or ProcessorWaits().seconds)
    outer = current_delays.set(watch.delays)
    try:
        with watch.installed(), watch.scope:
            async with stray_cancellation_raises(lambda: RunStopped(STRAY_CANCELLATION)):
                yield WatchedBlock(watch)
    finally:
        current_delays.reset(outer)
        # Replaces what the block raised, which the interruption caused.
        if watch.ending is not None:
            raise watch.ending from None


class _Watch:
    """One watched block: `_beat` runs on the loop, `_watch_beats` in a thread, the signal handlers in the main thread."""

    def __init__(
        self,
        stall_timeout_s: float,
        warn_after_s: float,
        on_exit: Callable[[Ending], str] | None,
        processor_wait_s: Callable[[], float],
    ) -> None:
        self.scope = anyio.CancelScope()
        self.ending: Ending | None = None
        self.delays = LoopDelays()
        self._stall_timeout_s, self._warn_after_s = stall_timeout_s, warn_after_s
        self._on_exit, self._processor_wait_s = on_exit, processor_wait_s
        self._ignoring: dict[asyncio.Task[Any], float] = {}
        """Tasks whose workflows run on after a cancellation, with the seconds since, counted while the loop runs."""
        self._ignoring_code: list[str] = []
        """The code that the longest of them is in."""
        self._warn_ignoring_s = warn_after_s
        self._loop = asyncio.get_running_loop()
        self._host = asyncio.current_task()
        self._thread_id = threading.get_ident()
        self._left = threading.Event()
        self._num_beats = 0
        self._beat_at = self._ending_at = self._looked_at = time.monotonic()
        self._num_raised = 0

    @contextmanager
    def installed(self) -> Generator[None, None, None]:
        self._beat()
        handlers: dict[signal.Signals, Callable[[int, FrameType | None], None]] = {_INTERRUPT: self._on_interrupt}
        for number in (signal.SIGINT, *TERMINATING):
            if callable(signal.getsignal(number)):
                handlers[number] = self._on_signal
        before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
        thread = threading.Thread(target=self._watch_beats, name="agentrl heartbeat", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._left.set()
            thread.join()
            for number, handler in before.items():
                signal.signal(number, handler)
            self._timer.cancel()

    @contextmanager
    def narrowed(self) -> Generator[None]:
        """Let what ends the block cancel only the inner block, and raise it after that has ended."""
        whole = self.scope
        with anyio.CancelScope() as self.scope:
            if self.ending is not None:
                self.scope.cancel()
            yield
        self.scope = whole
        if self.ending is not None:
            raise self.ending

    def _beat(self) -> None:
        now = time.monotonic()
        self.delays.count(now - self._beat_at - LOOP_BEAT_S)
        self._num_beats += 1
        self._beat_at = now
        self._timer = self._loop.call_later(LOOP_BEAT_S, self._beat)
        if now - self._looked_at >= IGNORING_S:
            self._look_for_ignoring_tasks(now - self._looked_at)
            self._looked_at = now

    def _look_for_ignoring_tasks(self, passed: float) -> None:
        # A task that waits for a thread does not see its cancellation, so at the end every remaining task counts.
        cancelled = [task for task in asyncio.all_tasks(self._loop) if self.ending is not None or task.cancelling()]
        running_on = [task for task in cancelled if workflow_code(task) is not None]
        self._ignoring = {task: self._ignoring.get(task, 0.0) + passed for task in running_on}
        longest = max(self._ignoring, key=self._ignoring.__getitem__, default=None)
        if longest is None:
            self._ignoring_code, self._warn_ignoring_s = [], self._warn_after_s
            return
        seconds, self._ignoring_code = self._ignoring[longest], workflow_code(longest) or []
        if self.ending is None and seconds >= self._stall_timeout_s:
            self._end(StallError(_ignoring_message(self._stall_timeout_s, self._ignoring_code)))
        elif self.ending is None and seconds >= self._warn_ignoring_s:
            logger.warning(_ignoring_message(self._warn_ignoring_s, self._ignoring_code))
            self._warn_ignoring_s *= 2

    @property
    def _unresponsive(self) -> bool:
        return time.monotonic() - self._beat_at >= UNRESPONSIVE_S

    def _watch_beats(self) -> None:
        is_named, waited_s = False, self._processor_wait_s()
        seen, silent_s, ending_s, warn_s, looked_at = 0, 0.0, 0.0, self._warn_after_s, time.monotonic()
        while not self._left.wait(LOOK_S):
            now = time.monotonic()
            # Time in which the whole process was stopped, by Ctrl-Z or a debugger, does not count.
            passed = min(now - looked_at, _STOPPED_S)
            silent_s += passed
            ending_s += passed if self.ending is not None else 0.0
            looked_at = now
            if ending_s >= EXIT_GRACE_S:
                self._exit_if_kept_alive()
            if self._num_beats != seen:
                seen, silent_s, warn_s, is_named = self._num_beats, 0.0, self._warn_after_s, False
                waited_s = self._processor_wait_s()
            elif self.ending is not None:
                if silent_s >= UNRESPONSIVE_S:
                    silent_s = 0.0  # code that blocks again gets the same time
                    signal.pthread_kill(self._thread_id, _INTERRUPT)
            else:
                own_s = silent_s - (self._processor_wait_s() - waited_s)
                if own_s >= NAME_AFTER_S and not is_named:  # before a warning, however late this look is
                    self.delays.name(self._thread_id)
                    is_named = True
                if silent_s >= self._stall_timeout_s:
                    self._end(StallError(self._blocked_message(self._stall_timeout_s)))
                    signal.pthread_kill(self._thread_id, _INTERRUPT)
                elif silent_s >= warn_s:
                    logger.warning(self._blocked_message(warn_s))
                    warn_s *= 2

    def _end(self, ending: StallError | KeyboardInterrupt) -> None:
        self.ending, self._ending_at = ending, time.monotonic()
        self._loop.call_soon_threadsafe(self.scope.cancel)

    def _exit_if_kept_alive(self) -> None:
        if self._on_exit is None or self.ending is None:
            return
        if self._unresponsive and is_in_user_code(self._thread_id):
            exit_process(self.ending, blocking_code(self._thread_id), self._on_exit)
        elif not self._unresponsive and self._ignoring:
            exit_process(self.ending, self._ignoring_code, self._on_exit)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if self.ending is None:
            self._end(interrupt_from(number))
            if self._unresponsive:
                self._raise_in_blocking_code()
        elif time.monotonic() - self._ending_at > REPEAT_S:
            raise self.ending

    def _on_interrupt(self, _number: int, _frame: FrameType | None) -> None:
        if self.ending is not None and self._unresponsive:
            self._raise_in_blocking_code()

    def _raise_in_blocking_code(self) -> None:
        """Raise in the code that blocks the loop; called from a signal handler, which runs on top of that code."""
        self._num_raised += 1
        current = asyncio.current_task(self._loop)
        if current is None and self._num_raised == 1:
            return  # the loop's own code: it reaches the cancellation by itself
        self.scope.cancel()
        if self._num_raised == 1:
            for task in asyncio.all_tasks(self._loop) - {current, self._host}:
                if _may_block(task.get_name()):
                    task.cancel()
            if isinstance(self.ending, StallError):
                raise StallError(str(self.ending))
        raise asyncio.CancelledError("interrupted while it blocked the event loop")

    def _blocked_message(self, seconds: float) -> str:
        return (
            f"the event loop has not run for {seconds:g} s: every episode, deadline and server waits for this code, "
            f"innermost frame first:\n{indented(blocking_code(self._thread_id))}\n{_BLOCKING_ADVICE}"
        )


def _ignoring_message(seconds: float, lines: list[str]) -> str:
    return (
        f"a workflow was cancelled {seconds:g} s ago and still runs; its canceller waits for this code, innermost frame "
        f"first:\n"
        f"{indented(lines)}\n{_IGNORING_ADVICE}"
    )


def _may_block(task_name: str) -> bool:
    """Return whether a task runs user code, by its name: such a task could block again before the loop cancels it.

    The loop cancels all other tasks, and waits for their shielded work, such as a line being written.
    """
    return not task_name.startswith("agentrl.") or task_name.startswith(_EPISODES)
