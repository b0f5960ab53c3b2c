"""The event loop's heartbeat: code that blocks the loop, or ignores its cancellation, is named and ended from outside it.

Invariant: inside `watched_loop` a loop that does not run is never silent. The loop stamps the time; a thread looks at the
stamps, warns of a loop that has stopped with the code that stopped it, and interrupts that code when the deadline has
passed or a signal asks for the end. Nothing else can: every deadline and cancellation of a run needs the loop. Nor can
anything within a process end a workflow that catches whatever it is interrupted with: where a command must end and such
code is what keeps it, the process ends as a whole, having said so; trainer and servers end with their driver.
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

from agentrl.errors import StallError
from agentrl.watchdog.signals import Ending, give_up, stop_of
from agentrl.watchdog.stacks import blocking_code, is_users, listed, workflow_code

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
LAST_S = 3.0
"""Seconds after which what should end and is kept by a workflow is given up; what it started then ends within two more.

It is also what a workflow has for closing its environment at the end, whatever the environment's own deadline.
"""
_LOOK_S = 0.25
_KICK = signal.SIGURG
"""Interrupts blocking code. Ignored by default, and by other programs, so that a late one harms nobody."""
_EPISODES = ("agentrl.rollout.", "agentrl.engine.evaluate.")
"""Names of the tasks that run workflows begin so, among ours."""
_ADVICE = (
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
    last_words: Callable[[Ending], str] | None = None,
) -> Result:
    """Run an async job on an event loop of its own, inside `watched_loop`, and return its result.

    Raises:
        StallError, KeyboardInterrupt: as for `watched_loop`; the job was cancelled.
    """

    async def watched() -> Result:
        async with watched_loop(stall_timeout_s, last_words=last_words):
            return await job()

    return anyio.run(watched)


@asynccontextmanager
async def watched_loop(
    stall_timeout_s: float, *, warn_after_s: float = WARN_AFTER_S, last_words: Callable[[Ending], str] | None = None
) -> AsyncGenerator[None]:
    """Watch the event loop for the length of the block.

    SIGINT, and SIGTERM where it has a handler, cancel the block; code that blocks the loop is interrupted for it. Ignored
    signals stay ignored. In a thread other than the main one, and under trio, nothing is watched.

    Args:
        stall_timeout_s: seconds the loop may be blocked, and a workflow may go on after it was cancelled.
        warn_after_s: seconds after which the first warning is logged.
        last_words: for a process that may end as a whole: called with what ends the block, in another thread, when a
            workflow has kept it for `LAST_S` seconds; saves what there is and returns where it is.

    Raises:
        StallError: code blocked the loop, or ignored its cancellation, for `stall_timeout_s`; the message names it.
        KeyboardInterrupt: a signal arrived; `Terminated` for SIGTERM.

    Cancellation: the thread and the signal handlers are gone.
    """
    if threading.current_thread() is not threading.main_thread() or not _under_asyncio():
        yield
        return
    watch = _Watch(stall_timeout_s, warn_after_s, last_words)
    try:
        with watch.installed(), watch.scope:
            yield
    finally:
        # Raised over what the block raised: that came of being interrupted.
        if watch.ending is not None:
            raise watch.ending from None


class _Watch:
    """One watched block: the beat runs on the loop, `_look` in a thread, the handlers in the main thread."""

    def __init__(self, stall_timeout_s: float, warn_after_s: float, last_words: Callable[[Ending], str] | None) -> None:
        self.scope = anyio.CancelScope()
        self.ending: Ending | None = None
        """What ends the block, once that is settled."""
        self._stall_timeout_s, self._warn_after_s = stall_timeout_s, warn_after_s
        self._last_words = last_words
        self._ignoring: dict[asyncio.Task[Any], float] = {}
        """Tasks whose workflows go on although they were cancelled, and for how many seconds of a running loop."""
        self._keeping: list[str] = []
        """What the first of them is doing."""
        self._warn_ignoring_s = warn_after_s
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
        # One that waits for a thread is not told of its cancellation, so that at the end all that are left count.
        told = [task for task in asyncio.all_tasks(self._loop) if self.ending is not None or task.cancelling()]
        going_on = [task for task in told if workflow_code(task) is not None]
        self._ignoring = {task: self._ignoring.get(task, 0.0) + BEAT_S for task in going_on}
        longest = max(self._ignoring, key=self._ignoring.__getitem__, default=None)
        if longest is None:
            self._keeping, self._warn_ignoring_s = [], self._warn_after_s
            return
        seconds, self._keeping = self._ignoring[longest], workflow_code(longest) or []
        if self.ending is None and seconds >= self._stall_timeout_s:
            self._end(StallError(_ignoring(self._stall_timeout_s, self._keeping)))
        elif self.ending is None and seconds >= self._warn_ignoring_s:
            logger.warning(_ignoring(self._warn_ignoring_s, self._keeping))
            self._warn_ignoring_s *= 2

    @property
    def _deaf(self) -> bool:
        return time.monotonic() - self._beat_at >= DEAF_S

    def _look(self) -> None:
        seen, silent_s, ending_s, warn_s, looked_at = 0, 0.0, 0.0, self._warn_after_s, time.monotonic()
        while not self._left.wait(_LOOK_S):
            now = time.monotonic()
            # The time a whole process was stopped, by Ctrl-Z or a debugger, is not the loop's.
            passed = min(now - looked_at, 2 * _LOOK_S)
            silent_s += passed
            ending_s += passed if self.ending is not None else 0.0
            looked_at = now
            if ending_s >= LAST_S:
                self._give_up_if_kept()
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

    def _give_up_if_kept(self) -> None:
        """End the process if a workflow is what keeps the block."""
        if self._last_words is None or self.ending is None:
            return
        if self._deaf and is_users(self._thread_id):
            give_up(self.ending, blocking_code(self._thread_id), self._last_words)
        elif not self._deaf and self._ignoring:
            give_up(self.ending, self._keeping, self._last_words)

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
        return (
            f"the event loop has not run for {seconds:g} s: every episode, deadline and server waits for this code, "
            f"innermost first:\n{listed(blocking_code(self._thread_id))}\n{_ADVICE}"
        )


def _ignoring(seconds: float, lines: list[str]) -> str:
    return (
        f"a workflow was cancelled {seconds:g} s ago and goes on; what cancelled it waits for this code, innermost first:\n"
        f"{listed(lines)}\n{_IGNORING_ADVICE}"
    )


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
