"""How a command ends when it is told to: Ctrl-C and SIGTERM, what is said, and the exit status.

Invariant: both signals do the same: what was started is ended, results are kept, one message says where they are; only the
word and the exit status differ (130 and 143). A signal that was ignored when the command began stays ignored.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import NoReturn, TypeAlias

from agentrl.errors import StallError
from agentrl.watchdog.stacks import listed


class Terminated(KeyboardInterrupt):
    """SIGTERM arrived; handled as Ctrl-C is."""


Ending: TypeAlias = StallError | KeyboardInterrupt
"""What ends a command before its work is done, unless that is an error of the work's own."""


def stop_of(number: int) -> KeyboardInterrupt:
    """Return what a signal raises, with the word people read.

    Example:
        >>> stop_of(signal.SIGTERM)
        Terminated('Ended by SIGTERM')
    """
    return Terminated("Ended by SIGTERM") if number == signal.SIGTERM else KeyboardInterrupt("Interrupted")


@contextmanager
def sigterm_raises() -> Generator[None, None, None]:
    """Raise `Terminated` in the main thread when SIGTERM arrives; nothing changes elsewhere, or where it has a handler.

    After an interrupt that leaves the block both signals are ignored: the process is ending, with a status of its own.
    """
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, _raise_terminated)
    after: signal.Handlers = signal.SIG_DFL
    try:
        yield
    except KeyboardInterrupt:
        after = signal.SIG_IGN
        signal.signal(signal.SIGINT, after)
        raise
    finally:
        signal.signal(signal.SIGTERM, after)


@contextmanager
def telling(what: Callable[[], str]) -> Generator[None, None, None]:
    """Have the message of an interrupt inside the block end with `what()`."""
    try:
        yield
    except KeyboardInterrupt as stop:
        stop.add_note(what())
        raise


def results_in(path: Path) -> str:
    """Return where results are, for `telling`.

    Example:
        >>> results_in(Path("/nowhere/run"))
        'Nothing was written to /nowhere/run.'
    """
    return f"Results so far are in {path}/." if path.exists() else f"Nothing was written to {path}."


def say_stopped(stop: KeyboardInterrupt) -> int:
    """Print that the command was interrupted and where its results are; return the exit status."""
    notes = "".join(f" {note}" for note in getattr(stop, "__notes__", ()))
    print(f"\n{stop_word(stop)}; everything this command started has ended.{notes}", file=sys.stderr)
    return _status(stop)


def give_up(ending: Ending, code: list[str], last_words: Callable[[Ending], str]) -> NoReturn:
    """Say what keeps the process from ending, save what there is, and end it as a whole; from any thread.

    Args:
        ending: why it should end.
        code: what keeps it, as `culprit` tells it.
        last_words: saves what there is and returns where it is.
    """
    try:
        where = last_words(ending)
    except Exception as error:  # noqa: BLE001 - the process ends, whatever this is
        where = f"Saving what there is failed: {type(error).__name__}: {error}"
    why = stop_word(ending) if isinstance(ending, KeyboardInterrupt) else f"agentrl: {ending}\nEnded"
    said = (
        f"\n{why} in the middle of a workflow that does not end when it is cancelled, innermost first:\n{listed(code)}\n"
        f"Everything this command started ends with it. {where}\n"
    )
    if os.isatty(2):
        said += "\x1b[?25h"  # a live display hides the cursor
    os.write(2, said.encode(errors="replace"))  # not through sys.stderr, which the main thread may hold
    os._exit(_status(ending))


def _status(ending: Ending) -> int:
    if isinstance(ending, StallError):
        return 1
    return 128 + (signal.SIGTERM if isinstance(ending, Terminated) else signal.SIGINT)


def stop_word(stop: KeyboardInterrupt) -> str:
    """Return `Interrupted`, or the word for what else stopped the command."""
    return str(stop) or "Interrupted"


def _raise_terminated(number: int, _frame: FrameType | None) -> NoReturn:
    raise stop_of(number)
