"""The end of a command: by Ctrl-C, SIGTERM or SIGHUP, or after its last line, in spite of threads that never return.

Invariant: the signals do the same; only the first words and the exit status differ (130, 143 and 129). A signal that was
ignored when the command began stays ignored. A command ends at most `EXIT_GRACE_S` after its last line, with the status that
it would have had; Python itself waits for every thread that is not a daemon, without end.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import NoReturn, TypeAlias, TypeVar

import anyio

from agentrl.errors import StallError
from agentrl.processes.watchdog.stacks import blocking_code, indented
from agentrl.support.foreign import visible

TERMINATING = (signal.SIGTERM, signal.SIGHUP)
"""Signals that end a command as Ctrl-C does: a supervisor sends the first, a terminal that is closed the second."""
Result = TypeVar("Result")

EXIT_GRACE_S = 3.0
"""Seconds that a thread or a workflow, whatever the deadline of its environment, may keep an ending command alive before the
process exits; what it started ends within two more."""


class Terminated(KeyboardInterrupt):
    """A signal of `TERMINATING` arrived; handled like Ctrl-C."""

    def __init__(self, number: int) -> None:
        self.number = signal.Signals(number)
        super().__init__(f"Ended by {self.number.name}")


Ending: TypeAlias = StallError | KeyboardInterrupt
"""The end of a command from outside its own work."""


def interrupt_from(number: int) -> KeyboardInterrupt:
    """Return the exception that a signal raises; its text opens the message that people read."""
    return Terminated(number) if number in TERMINATING else KeyboardInterrupt("Interrupted")


@contextmanager
def sigterm_raises() -> Generator[None, None, None]:
    """Raise `Terminated` in the main thread on SIGTERM and SIGHUP, except where they have a handler; not in other threads.

    After an interrupt leaves the block, the signals are ignored: the process is ending and its exit status is settled.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handled = [number for number in TERMINATING if signal.getsignal(number) == signal.SIG_DFL]
    for number in handled:
        signal.signal(number, _raise_terminated)
    after: signal.Handlers = signal.SIG_DFL
    try:
        yield
    except KeyboardInterrupt:
        after = signal.SIG_IGN
        signal.signal(signal.SIGINT, after)
        raise
    finally:
        for number in handled:
            signal.signal(number, after)


@contextmanager
def interrupt_note(note: Callable[[], str]) -> Generator[None, None, None]:
    """Add `note()` to the message of an interrupt that leaves the block."""
    try:
        yield
    except KeyboardInterrupt as interrupt:
        interrupt.add_note(note())
        raise


def describe_results(path: Path) -> str:
    """Return a sentence that says where results are, for `interrupt_note`."""
    return f"Results so far are in {path}/." if path.exists() else f"Nothing was written to {path}."


def print_interrupt(interrupt: KeyboardInterrupt) -> int:
    """Print that the command was interrupted, with the notes of the interrupt; return the exit status."""
    notes = "".join(f" {note}" for note in getattr(interrupt, "__notes__", ()))
    print_error(visible(f"\n{interrupt_text(interrupt)}; everything this command started has ended.{notes}"))
    return _status(interrupt)


def print_error(message: str) -> None:
    """Print to standard error; a stream that has no reader, or a full disk behind it, changes nothing."""
    with suppress(OSError, ValueError):
        print(message, file=sys.stderr)


def exit_process(ending: Ending, code: list[str], on_exit: Callable[[Ending], str]) -> NoReturn:
    """Print which code keeps the process alive, and what `on_exit` returns; exit the process at once, from any thread."""
    try:
        where = on_exit(ending)
    except Exception as error:  # noqa: BLE001 - the process exits, whatever this is
        where = f"The results could not be saved: {type(error).__name__}: {error}"
    why = interrupt_text(ending) if isinstance(ending, KeyboardInterrupt) else f"agentrl: {ending}\nEnded"
    message = (
        f"\n{why} in the middle of a workflow that does not end when it is cancelled, innermost frame first:\n"
        f"{indented(code)}\nEverything this command started ends with it. {where}\n"
    )
    if os.isatty(2):
        message += "\x1b[?25h"  # a live display hides the cursor
    os.write(2, message.encode(errors="replace"))  # not through sys.stderr, which the main thread may hold
    os._exit(_status(ending))


def interrupt_text(interrupt: KeyboardInterrupt) -> str:
    """Return the first words of the message for an interrupt."""
    return str(interrupt) or "Interrupted"


def _status(ending: Ending) -> int:
    if isinstance(ending, StallError):
        return 1
    return 128 + (ending.number if isinstance(ending, Terminated) else signal.SIGINT)


def _raise_terminated(number: int, _frame: FrameType | None) -> NoReturn:
    raise interrupt_from(number)


class _Executor(ThreadPoolExecutor):
    """Runs `asyncio.to_thread`; a loop that closes does not wait for its threads."""

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        super().shutdown(wait=False, cancel_futures=True)


def run_without_waiting(job: Callable[[], Awaitable[Result]]) -> Result:
    """Run an async job on a new asyncio loop and return its result, also where threads that it started run on."""

    async def main() -> Result:
        asyncio.get_running_loop().set_default_executor(_Executor(thread_name_prefix="asyncio"))
        return await job()

    return anyio.run(main)


@contextmanager
def threads_end_with_command() -> Generator[None]:
    """Exit the process `EXIT_GRACE_S` seconds after the block, with the block's status, if threads keep it alive."""
    status = 0
    try:
        yield
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        raise
    except BaseException:
        status = 1
        raise
    finally:
        if _living():
            threading.Thread(target=_exit_when_late, args=(status,), name="agentrl end", daemon=True).start()


def _living() -> list[threading.Thread]:
    here = threading.current_thread()
    return [t for t in threading.enumerate() if not t.daemon and t is not threading.main_thread() and t is not here]


def _exit_when_late(status: int) -> None:
    deadline = time.monotonic() + EXIT_GRACE_S
    for thread in _living():
        thread.join(max(0.0, deadline - time.monotonic()))
    late = [thread for thread in _living() if thread.ident is not None]
    if not late:
        return
    where = "\n".join(f"{thread.name}:\n{indented(blocking_code(thread.ident or 0))}" for thread in late[:4])
    message = (
        f"\nagentrl: {len(late)} thread(s) still run {EXIT_GRACE_S:g} s after the end; the process exits without them "
        f"(give what runs in a thread a timeout). Innermost frame first, {where}\n"
    )
    with suppress(OSError, ValueError, AttributeError):
        sys.stdout.flush()
    with suppress(OSError):
        os.write(2, message.encode(errors="replace"))
    os._exit(status)
