"""The message and the exit status of a command that Ctrl-C, SIGTERM or SIGHUP ends.

Invariant: the signals do the same; only the first words and the exit status differ (130, 143 and 129). A signal that was
ignored when the command began stays ignored.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import NoReturn, TypeAlias

from agentrl.errors import StallError
from agentrl.foreign import visible
from agentrl.watchdog.stacks import indented

TERMINATING = (signal.SIGTERM, signal.SIGHUP)
"""Signals that end a command as Ctrl-C does: a supervisor sends the first, a terminal that is closed the second."""


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
