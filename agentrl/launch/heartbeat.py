"""The event loop's heartbeat: code that blocks the loop is named, and ended from outside it.

Invariant: inside `watched_loop` a loop that does not run is never silent. The loop stamps the time; a thread looks at the
stamps, warns of a loop that has stopped with the code that stopped it, and interrupts that code when the deadline has
passed or a signal asks for the end. Nothing else can: every deadline and cancellation of a run needs the loop.
"""

from __future__ import annotations

import asyncio
import importlib.util
import linecache
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from contextlib import asynccontextmanager, contextmanager
from types import FrameType
from typing import TypeVar

import anyio

from agentrl.errors import StallError
from agentrl.launch.interrupts import stop_of

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

STALL_TIMEOUT_S = 900.0
"""Seconds the loop may be blocked where no run file says another number; `engine.stall_timeout_s` of a run."""
WARN_AFTER_S = 10.0
"""Seconds without a beat after which the first warning comes; the next ones come at twice the time of the last."""
BEAT_S = 0.5
"""Seconds between two beats of a loop that runs."""
DEAF_S = 1.0
"""Seconds without a beat after which the loop will not see a cancellation, so that the code in its way is interrupted."""
PATIENCE_S = 5.0
"""Seconds after an interrupt in which further ones change nothing: what was started is being ended."""
_LOOK_S = 0.25
_MAX_FRAMES = 6
_KICK = signal.SIGURG
"""Interrupts blocking code. Ignored by default, and by other programs, so that a late one harms nobody."""
_EPISODES = ("agentrl.rollout.", "agentrl.engine.evaluate.")
"""Names of the tasks that run workflows begin so, among ours."""
_ADVICE = (
    "A workflow that computes or waits without await stops every episode; await it, or move it off the loop with "
    "anyio.to_thread.run_sync."
)


def run_watched(job: Callable[[], Awaitable[Result]], *, stall_timeout_s: float = STALL_TIMEOUT_S) -> Result:
    """Run an async job on an event loop of its own, inside `watched_loop`, and return its result.

    Raises:
        StallError, KeyboardInterrupt: as for `watched_loop`; the job was cancelled.
    """

    async def watched() -> Result:
        async with watched_loop(stall_timeout_s):
            return await job()

    return anyio.run(watched)


@asynccontextmanager
async def watched_loop(stall_timeout_s: float, *, warn_after_s: float = WARN_AFTER_S) -> AsyncGenerator[None]:
    """Watch the event loop for the length of the block.

    SIGINT, and SIGTERM where it has a handler, cancel the block; code that blocks the loop is interrupted for it. Ignored
    signals stay ignored. In a thread other than the main one, and under trio, nothing is watched.

    Args:
        stall_timeout_s: seconds the loop may be blocked.
        warn_after_s: seconds after which the first warning is logged.

    Raises:
        StallError: code blocked the loop for `stall_timeout_s`; the message names it.
        KeyboardInterrupt: a signal arrived; `Terminated` for SIGTERM.

    Cancellation: the thread and the signal handlers are gone.
    """
    if threading.current_thread() is not threading.main_thread() or not _under_asyncio():
        yield
        return
    watch = _Watch(stall_timeout_s, warn_after_s)
    try:
        with watch.installed(), watch.scope:
            yield
    finally:
        # Raised over what the block raised: that came of being interrupted.
        if watch.ending is not None:
            raise watch.ending from None


class _Watch:
    """One watched block: the beat runs on the loop, `_look` in a thread, the handlers in the main thread."""

    def __init__(self, stall_timeout_s: float, warn_after_s: float) -> None:
        self.scope = anyio.CancelScope()
        self.ending: StallError | KeyboardInterrupt | None = None
        """What ends the block, once that is settled."""
        self._stall_timeout_s, self._warn_after_s = stall_timeout_s, warn_after_s
        self._loop = asyncio.get_running_loop()
        self._host = asyncio.current_task()
        self._thread_id = threading.get_ident()
        self._left = threading.Event()
        self._num_beats = 0
        self._beat_at = self._ending_at = time.monotonic()
        self._num_thrown = 0

    @contextmanager
    def installed(self) -> Generator[None, None, None]:
        """Have the beat, the thread and the signal handlers for the length of the block."""
        self._beat()
        handlers: dict[signal.Signals, Callable[[int, FrameType | None], None]] = {_KICK: self._on_kick}
        for number in (signal.SIGINT, signal.SIGTERM):
            if callable(signal.getsignal(number)):
                handlers[number] = self._on_stop
        before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
        thread = threading.Thread(target=self._look, name="agentrl heartbeat", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._left.set()
            thread.join()
            for number, handler in before.items():
                signal.signal(number, handler)
            self._timer.cancel()

    def _beat(self) -> None:
        self._num_beats += 1
        self._beat_at = time.monotonic()
        self._timer = self._loop.call_later(BEAT_S, self._beat)

    @property
    def _deaf(self) -> bool:
        return time.monotonic() - self._beat_at >= DEAF_S

    def _look(self) -> None:
        seen, silent_s, warn_s, looked_at = 0, 0.0, self._warn_after_s, time.monotonic()
        while not self._left.wait(_LOOK_S):
            now = time.monotonic()
            # The time a whole process was stopped, by Ctrl-Z or a debugger, is not the loop's.
            silent_s += min(now - looked_at, 2 * _LOOK_S)
            looked_at = now
            if self._num_beats != seen:
                seen, silent_s, warn_s = self._num_beats, 0.0, self._warn_after_s
            elif self.ending is not None:
                if silent_s >= DEAF_S:
                    silent_s = 0.0  # the next one, should something block again, comes as late
                    signal.pthread_kill(self._thread_id, _KICK)
            elif silent_s >= self._stall_timeout_s:
                self._end(StallError(self._describe(self._stall_timeout_s)))
                signal.pthread_kill(self._thread_id, _KICK)
            elif silent_s >= warn_s:
                logger.warning(self._describe(warn_s))
                warn_s *= 2

    def _end(self, ending: StallError | KeyboardInterrupt) -> None:
        self.ending, self._ending_at = ending, time.monotonic()
        self._loop.call_soon_threadsafe(self.scope.cancel)

    def _on_stop(self, number: int, _frame: FrameType | None) -> None:
        if self.ending is None:
            self._end(stop_of(number))
            if self._deaf:
                self._throw()
        elif time.monotonic() - self._ending_at > PATIENCE_S:
            raise self.ending

    def _on_kick(self, _number: int, _frame: FrameType | None) -> None:
        if self.ending is not None and self._deaf:
            self._throw()

    def _throw(self) -> None:
        """Raise, from a signal handler, in the code that blocks the loop."""
        self._num_thrown += 1
        current = asyncio.current_task(self._loop)
        if current is None and self._num_thrown == 1:
            return  # the loop's own code: it is on its way to the cancellation
        self.scope.cancel()
        if self._num_thrown == 1:
            for task in asyncio.all_tasks(self._loop) - {current, self._host}:
                if _may_block(task.get_name()):
                    task.cancel()
            if isinstance(self.ending, StallError):
                raise StallError(str(self.ending))
        raise asyncio.CancelledError("interrupted while it blocked the event loop")

    def _describe(self, seconds: float) -> str:
        where = "\n".join(f"  {line}" for line in blocking_code(self._thread_id))
        return (
            f"the event loop has not run for {seconds:g} s: every episode, deadline and server waits for this code, "
            f"innermost first:\n{where}\n{_ADVICE}"
        )


def blocking_code(thread_id: int) -> list[str]:
    """Return what a thread is doing, innermost first, as `file:line in function: source`.

    The event loop and, where the user's code is on the stack, what calls it are left out.
    """
    frame = sys._current_frames().get(thread_id)  # pyright: ignore[reportPrivateUsage] - the only way to see another thread
    stack: list[tuple[str, int, str]] = []
    while frame is not None and not (frame.f_code.co_filename.startswith(_LOOP) and frame.f_code.co_name == "_run"):
        stack.append((frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_qualname))
        frame = frame.f_back
    stack = [entry for entry in stack if not entry[0].startswith("<frozen ")]
    users = [index for index, entry in enumerate(stack) if not entry[0].startswith(_MACHINERY)]
    visible = stack[: users[-1] + 1 if users else None][:_MAX_FRAMES]
    return [f"{_short(file)}:{line} in {name}: {linecache.getline(file, line).strip()}" for file, line, name in visible]


def _home(package: str) -> str:
    found = importlib.util.find_spec(package)
    assert found is not None
    assert found.origin is not None
    return os.path.dirname(found.origin) + os.sep


_LOOP = _home("asyncio")
_MACHINERY = (_LOOP, _home("anyio"), _home("agentrl"))


def _short(file: str) -> str:
    here = os.getcwd() + os.sep
    return file.removeprefix(here)


def _may_block(task_name: str) -> bool:
    """Return whether a task, by its name, runs a user's code: about to run, it would block before the loop can cancel it.

    The others are left to the loop, which waits for what is shielded, such as a line being written.
    """
    return not task_name.startswith("agentrl.") or task_name.startswith(_EPISODES)


def _under_asyncio() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
