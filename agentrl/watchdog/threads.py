"""Threads that never return cannot keep a command alive after its work is done.

Invariant: a command ends at most `EXIT_GRACE_S` after its last line, with the status it would have had. Python itself waits
for every thread that is not a daemon, without end.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import TypeVar

import anyio

from agentrl.watchdog.stacks import blocking_code, indented

Result = TypeVar("Result")

EXIT_GRACE_S = 3.0
"""Seconds that a thread or a workflow, whatever the deadline of its environment, may keep an ending command alive before the
process exits; what it started ends within two more."""


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
