"""A task group whose failure is one error, not a group of one.

Invariant: no task outlives the block; the first of our own errors among the failures is the one that leaves it.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager

import anyio
from anyio.abc import TaskGroup

from agentrl.errors import AgentRLError


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
