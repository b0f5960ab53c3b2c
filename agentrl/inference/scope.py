"""Deadlines and task groups as the inference side uses them.

Invariant: whoever waits has a deadline, and its message says for what; a task group with one failure raises that failure.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Self

import anyio
from anyio.abc import TaskGroup

from agentrl.errors import ServerTimeout


class Deadline:
    """Bounds one block. Others may call it off: the block ends at its next await, without an error if there is still time.

    Example:
        with Deadline(60, lambda: f"{url}: no sign of life", url):
            await server.check()

    Raises:
        ServerTimeout: on leaving a block that the deadline has ended, with the message and the seconds.

    Cancellation: passes through.
    """

    __slots__ = ("_message", "_scope", "_seconds", "_url", "_waits", "call_off")

    def __init__(
        self, seconds: float, message: Callable[[], str], url: str | None = None, *, since: float | None = None
    ) -> None:
        """Begin to count.

        Args:
            seconds: until the block is ended.
            message: who waited for what; asked only when the deadline has passed.
            url: of the server that was waited for.
            since: where the seconds began, by `anyio.current_time()`; None: now.
        """
        self._seconds, self._message, self._url = seconds, message, url
        self._scope = anyio.CancelScope(deadline=(anyio.current_time() if since is None else since) + seconds)
        self.call_off: Callable[[], None] = self._scope.cancel
        """Ends the block at its next await; does nothing once it is left."""
        self._waits: set[Deadline] = set()

    def join(self, waits: set[Deadline]) -> None:
        """Be one of `waits`, and of no others, until the block is left."""
        self._waits.discard(self)
        self._waits = waits
        waits.add(self)

    def __enter__(self) -> Self:
        self._scope.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        self._waits.discard(self)
        done = self._scope.__exit__(kind, error, trace)
        if self._scope.cancelled_caught and anyio.current_time() >= self._scope.deadline:
            raise ServerTimeout(f"{self._message()} (deadline {self._seconds:g} s)", url=self._url)
        return done


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
