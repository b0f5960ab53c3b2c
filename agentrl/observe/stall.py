"""Who waits for whom, and the watchdog that says so when nothing moves.

Invariant: every long wait of a run is on the board while it lasts. The watchdog has one deadline, which every bit of
progress moves; it never polls.
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
    """One party's wait."""

    who: str
    whom: Callable[[], str]
    since: float


class WaitBoard:
    """The waits of a run, now.

    Example:
        >>> board = WaitBoard(now=lambda: 0.0)
        >>> with board.waiting("the trainer", "groups 3, 4"):
        ...     board.lines()
        ['the trainer waits for groups 3, 4 since 0.0 s']
    """

    def __init__(self, *, now: Callable[[], float] = time.monotonic) -> None:
        """Start empty; `now` is the clock, in seconds."""
        self._now = now
        self._waits: dict[int, Wait] = {}
        self._next = 0

    @contextmanager
    def waiting(self, who: str, whom: str | Callable[[], str]) -> Generator[None, None, None]:
        """Keep a wait on the board for as long as the block runs.

        Args:
            who: the party that waits.
            whom: what it waits for; a function is asked whenever somebody looks.
        """
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
    """Extra seconds, so that a part with an equally long deadline of its own reports first."""

    def __init__(self, *, timeout_s: float, describe: Callable[[], str]) -> None:
        """Wait `timeout_s`; `describe` says, then, who waits for whom."""
        self._timeout_s = timeout_s
        self._describe = describe
        self._scope: anyio.CancelScope | None = None

    def progress(self) -> None:
        """Something moved: the deadline starts anew."""
        if self._scope is not None:
            self._scope.deadline = anyio.current_time() + self._timeout_s + min(self.GRACE_S, self._timeout_s)

    async def watch(self) -> NoReturn:
        """Wait for the deadline.

        Raises:
            StallError: when it passes; the message names who waits for whom.

        Cancellation: nothing is left behind.
        """
        with anyio.CancelScope() as self._scope:
            self.progress()
            await anyio.sleep_forever()
        raise StallError(f"nothing has moved for {self._timeout_s:g} s.\n{self._describe()}")
