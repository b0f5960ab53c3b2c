"""Calls that an agent gives up: a stream that it leaves, a timeout of its own, a scope that it cancels.

What the server had sampled by then was a decision of the policy, so it becomes a turn. What the end of the episode cuts
(its deadline, the end of the run, an abandoned group) becomes none.

Invariant: a call that is given up ends at the server. Its output is waited for in a shielded scope, for `GIVE_UP_S` at most,
and no longer than the episode lasts.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager
from typing import Final, Generic, TypeVar

import anyio

from agentrl.concurrency import task_group

GIVE_UP_S: Final = 30.0
"""Seconds that a server has to end a call that is given up; one that answers takes a step of its sampling."""
_ASK_AGAIN_S: Final = 2.0
"""Seconds after which the server is asked again: it ignores what overtakes the call itself."""

T = TypeVar("T")


class EpisodeEnd:
    """The end of an episode by the engine, which cuts the waits for calls that were given up."""

    def __init__(self) -> None:
        self.has_come = False
        self._waits: set[anyio.CancelScope] = set()

    def come(self) -> None:
        """Cut all waits, and allow no more."""
        self.has_come = True
        for wait in self._waits:
            wait.cancel()

    @contextmanager
    def bounded(self) -> Generator[None]:
        """Shield a wait; it ends after `GIVE_UP_S`, or with the episode."""
        with anyio.CancelScope(shield=True, deadline=anyio.current_time() + GIVE_UP_S) as wait:
            self._waits.add(wait)
            try:
                yield
            finally:
                self._waits.discard(wait)


class _Outcome(Generic[T]):
    """What a call returned or raised."""

    def __init__(self) -> None:
        self.done = anyio.Event()
        self.scope = anyio.CancelScope(shield=True)
        self.results: list[T] = []
        self.error: Exception | None = None

    async def run(self, call: Callable[[], Awaitable[T]]) -> None:
        try:
            with self.scope:
                self.results.append(await call())
        except Exception as error:  # raised where the call is waited for
            self.error = error
        self.done.set()


async def outcome_of(
    call: Callable[[], Awaitable[T]],
    *,
    give_up: Callable[[], Awaitable[None]],
    end: EpisodeEnd,
    late: Callable[[T | None], None],
) -> T:
    """Return what `call` returns. It runs in a task of its own, which no cancellation of the caller reaches.

    Cancellation: `give_up` makes `call` return early, and `late` takes what it returns; None where it failed, or did not
    return in time. Neither is called if the episode ends.
    """
    outcome = _Outcome[T]()
    async with task_group() as tasks:
        tasks.start_soon(outcome.run, call)
        try:
            await outcome.done.wait()
        except anyio.get_cancelled_exc_class():
            if not end.has_come:
                with end.bounded():
                    await _ask_until(outcome.done, give_up)
                if not end.has_come:
                    late(outcome.results[0] if outcome.results else None)
            raise
        finally:
            outcome.scope.cancel()
    if outcome.error is not None:
        raise outcome.error
    return outcome.results[0]


async def _ask_until(done: anyio.Event, give_up: Callable[[], Awaitable[None]]) -> None:
    while not done.is_set():
        with anyio.move_on_after(_ASK_AGAIN_S):
            await give_up()
            await done.wait()
