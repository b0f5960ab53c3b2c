"""The waits of a run, and the timer that ends the run and names them when nothing moves.

Invariant: the board lists each long wait of a run while it lasts. The timer has one deadline, which any progress moves; it
never polls.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NoReturn

import anyio

from agentrl.errors import StallError


@dataclass(slots=True)
class Wait:
    """One party that waits for another."""

    who: str
    whom: Callable[[], str]
    since: float


class WaitBoard:
    """The present waits of a run.

    Example:
        >>> board = WaitBoard(now=lambda: 0.0)
        >>> with board.waiting("the trainer", "groups 3, 4"):
        ...     board.lines()
        ['the trainer waits for groups 3, 4 since 0.0 s']
    """

    def __init__(self, *, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._waits: dict[int, Wait] = {}
        self._next = 0

    @contextmanager
    def waiting(self, who: str, whom: str | Callable[[], str]) -> Generator[None, None, None]:
        """List a wait on the board while the block runs; a function `whom` is called for each look at the board."""
        key, self._next = self._next, self._next + 1
        self._waits[key] = Wait(who, whom if callable(whom) else lambda: whom, self._now())
        try:
            yield
        finally:
            del self._waits[key]

    def lines(self) -> list[str]:
        """Return one line for each wait, the longest first."""
        now = self._now()
        waits = sorted(self._waits.values(), key=lambda wait: wait.since)
        return [f"{wait.who} waits for {wait.whom()} since {now - wait.since:.1f} s" for wait in waits]


class StallTimer:
    """Ends a run in which nothing has moved for `timeout_s` seconds."""

    GRACE_S = 1.0
    """Extra seconds, so that a part with a deadline of the same length reports first."""

    def __init__(
        self, *, timeout_s: float, describe: Callable[[], str], is_idle: Callable[[], bool] = lambda: False
    ) -> None:
        """`is_idle` says whether the run waits for people, who have no deadline."""
        self._timeout_s = timeout_s
        self._describe, self._is_idle = describe, is_idle
        self._scope: anyio.CancelScope | None = None

    def progress(self) -> None:
        if self._scope is not None:
            self._scope.deadline = anyio.current_time() + self._timeout_s + min(self.GRACE_S, self._timeout_s)

    async def watch(self) -> NoReturn:
        """Wait for the deadline."""
        while True:
            with anyio.CancelScope() as self._scope:
                self.progress()
                await anyio.sleep_forever()
            if not self._is_idle():
                break
        raise StallError(f"nothing has moved for {self._timeout_s:g} s.\n{self._describe()}")
