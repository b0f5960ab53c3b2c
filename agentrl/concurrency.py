"""Deadlines and task groups as the inference side uses them.

Invariant: whoever waits has a deadline, and its message says for what; a task group with one failure raises that failure.

A task group whose failure is one error, not a group of one.

Invariant: no task outlives the block; the first of our own errors among the failures is the one that leaves it.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Self

import anyio
from anyio.abc import TaskGroup

from agentrl.errors import AgentRLError, ServerTimeout


def flatten(error: BaseException) -> Iterator[BaseException]:
    """Yield the exceptions inside nested exception groups, in order.

    Example:
        >>> [str(e) for e in flatten(ExceptionGroup("g", [ValueError("a"), ExceptionGroup("h", [KeyError(1)])]))]
        ['a', '1']
    """
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from flatten(inner)
    else:
        yield error


@asynccontextmanager
async def open_tasks() -> AsyncGenerator[TaskGroup]:
    """Yield a task group; when a task fails, the others are cancelled and that error is raised by itself.

    Of several failures the first agentrl error is raised, else the first of all; the group stays as its cause. A group that
    holds something other than errors, such as a keyboard interrupt, passes unchanged.

    Cancellation: every task is cancelled and awaited.
    """
    try:
        async with anyio.create_task_group() as tasks:
            yield tasks
    except ExceptionGroup as group:
        errors = list(flatten(group))
        first = next((e for e in errors if isinstance(e, AgentRLError)), errors[0])
        if len(errors) == 1:
            raise first from first.__cause__
        raise first from group


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
