"""Things that clients of a server open, use in several requests, and close: each lives in a task of its own.

Invariant: the task that opens a thing closes it: when a client asks, when no client has used it for too long, and when the
server ends. No failure of one ends another.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Generator
from contextlib import AbstractAsyncContextManager, contextmanager
from typing import Generic, TypeVar

import anyio
from anyio.abc import TaskGroup, TaskStatus

Thing = TypeVar("Thing")


class _Held(Generic[Thing]):
    """An open thing; the deadline of its scope is when it has been idle for too long."""

    def __init__(self, thing: Thing, idle_s: float) -> None:
        self.thing, self.idle_s = thing, idle_s
        self.scope = anyio.CancelScope()
        self.has_ended = anyio.Event()
        self.failure: Exception | None = None
        self.num_uses = 0

    def touch(self) -> None:
        """Count it as used now."""
        self.scope.deadline = math.inf if self.num_uses else anyio.current_time() + self.idle_s


class Holding(Generic[Thing]):
    """Holds open things under random names of 128 bits.

    Args:
        tasks: in which they live.
    """

    def __init__(self, tasks: TaskGroup) -> None:
        self._tasks = tasks
        self._held: dict[str, _Held[Thing]] = {}
        self._taken: set[str] = set()
        """Names of things that are open or being opened."""

    def __len__(self) -> int:
        """Return how many are open or being opened."""
        return len(self._taken)

    async def open(
        self, opened: AbstractAsyncContextManager[Thing], *, idle_s: float = math.inf, tasks: TaskGroup | None = None
    ) -> str:
        """Open one and return its name; raises what its opening raises.

        Args:
            opened: opens and closes it.
            idle_s: seconds without a use after which it is closed.
            tasks: in which it lives; None: those of all others.
        """
        name = secrets.token_urlsafe(16)
        self._taken.add(name)
        try:
            failure = await (tasks or self._tasks).start(self._hold, name, opened, idle_s)
        except BaseException:
            self._taken.discard(name)  # the task may never have begun
            raise
        if failure is not None:
            raise failure
        return name

    async def _hold(
        self,
        name: str,
        opened: AbstractAsyncContextManager[Thing],
        idle_s: float,
        *,
        task_status: TaskStatus[Exception | None],
    ) -> None:
        held: _Held[Thing] | None = None
        try:
            async with opened as thing:
                held = self._held[name] = _Held(thing, idle_s)
                held.touch()
                task_status.started(None)
                with held.scope:
                    await anyio.sleep_forever()
                del self._held[name]  # before it is closed, so that no use finds half of it
        except Exception as error:  # noqa: BLE001 - the failure of one must not end the others
            if held is None:
                task_status.started(error)
            else:
                held.failure = error
        finally:
            self._held.pop(name, None)  # of one that was cancelled
            self._taken.discard(name)
            if held is not None:
                held.has_ended.set()

    @contextmanager
    def use(self, name: str) -> Generator[Thing | None]:
        """Yield an open thing, which is not idle in the block; None: there is none of this name."""
        held = self._held.get(name)
        if held is None:
            yield None
            return
        held.num_uses += 1
        held.touch()
        try:
            yield held.thing
        finally:
            held.num_uses -= 1
            held.touch()

    def get(self, name: str) -> Thing | None:
        """Return an open thing without using it; None: there is none of this name."""
        held = self._held.get(name)
        return None if held is None else held.thing

    def touch(self, is_used: Callable[[Thing], bool]) -> None:
        """Count those that `is_used` says as used now."""
        for held in self._held.values():
            if is_used(held.thing):
                held.touch()

    async def close(self, name: str) -> None:
        """Close one, and wait until it is closed; raises what its closing raises."""
        held = self._held.get(name)
        if held is None:
            return
        held.scope.cancel()
        await held.has_ended.wait()
        if held.failure is not None:
            raise held.failure
