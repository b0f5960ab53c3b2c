"""Deadlines and task groups as the inference side uses them.

Invariant: whoever waits has a deadline, and its message says for what; a task group with one failure raises that failure.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import asynccontextmanager, contextmanager

import anyio
from anyio.abc import TaskGroup

from agentrl.errors import ServerTimeout


@contextmanager
def deadline(seconds: float, message: Callable[[], str], url: str | None = None) -> Generator[None, None, None]:
    """Bound the block; `message` is asked only when the deadline passes.

    Raises:
        ServerTimeout: after `seconds`, with `message()`.
    """
    with anyio.move_on_after(seconds) as scope:
        yield
    if scope.cancelled_caught:
        raise ServerTimeout(f"{message()} (deadline {seconds:g} s)", url=url)


def only_error(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the one exception in `group`, however deeply nested; `group` itself when there are several."""
    found: BaseException = group
    while isinstance(found, BaseExceptionGroup) and len(found.exceptions) == 1:
        found = found.exceptions[0]
    return group if isinstance(found, BaseExceptionGroup) else found


@asynccontextmanager
async def task_group() -> AsyncGenerator[TaskGroup, None]:
    """Open a task group that raises a single failure as itself, not wrapped in a group.

    Cancellation: the tasks of the group are cancelled and awaited.
    """
    try:
        async with anyio.create_task_group() as group:
            yield group
    except BaseExceptionGroup as failures:
        error = only_error(failures)
        if error is failures:
            raise
        raise error from error.__cause__
