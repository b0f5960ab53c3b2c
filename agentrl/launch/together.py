"""Open two async context managers at once: a server and a trainer each take seconds to start.

Invariant: when the block is left, both have been closed, each in the task that opened it; a failure of one ends the
other.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Generic, NamedTuple, TypeVar

import anyio
from anyio.abc import TaskStatus

from agentrl.rollout.tasks import open_tasks

First = TypeVar("First")
Second = TypeVar("Second")


class Pair(NamedTuple, Generic[First, Second]):
    """What the two context managers gave."""

    first: First
    second: Second


@asynccontextmanager
async def opened_together(
    first: AbstractAsyncContextManager[First], second: AbstractAsyncContextManager[Second]
) -> AsyncGenerator[Pair[First, Second], None]:
    """Yield what both give, having entered them concurrently.

    Raises:
        What either raised on entry, in its background or on exit, or what the block raised; of several, ours first.

    Cancellation: both are closed.
    """
    values: dict[int, Any] = {}
    leave = anyio.Event()

    async def hold(index: int, manager: AbstractAsyncContextManager[object], *, task_status: TaskStatus[None]) -> None:
        async with manager as values[index]:
            task_status.started()
            await leave.wait()

    async with open_tasks() as holders:
        async with anyio.create_task_group() as starters:
            for index, manager in enumerate((first, second)):
                starters.start_soon(holders.start, hold, index, manager)
        try:
            yield Pair(values[0], values[1])
        finally:
            leave.set()
