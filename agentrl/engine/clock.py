"""The policy version and those who wait for it to move.

Invariant: the version only grows, by one per published update, and every waiter sees each change: a wait is an event, never
a poll. The trainer loop moves the clock; the rollout dispatcher waits on it through the buffer's admission.
"""

from __future__ import annotations

from collections.abc import Callable

import anyio

from agentrl.errors import InvariantError, StallError


class Signal:
    """A change that any number of tasks wait for; each `fire` wakes all that wait at that moment."""

    def __init__(self) -> None:
        self._event = anyio.Event()

    def fire(self) -> None:
        """Wake every waiter."""
        self._event.set()
        self._event = anyio.Event()

    async def wait(self) -> None:
        """Return after the next `fire`.

        Cancellation: nothing is left behind.
        """
        await self._event.wait()

    async def wait_until(self, holds: Callable[[], bool], *, timeout_s: float | None, what: Callable[[], str]) -> None:
        """Return once `holds()` is true; it is asked now and after each `fire`.

        Args:
            holds: the condition; must not await.
            timeout_s: the longest wait, seconds; None where the run's watchdog is the deadline.
            what: says who waits for whom, when it comes to that.

        Raises:
            StallError: when it does not hold in time.

        Cancellation: nothing is left behind.
        """
        with anyio.move_on_after(timeout_s) as scope:
            while not holds():
                await self.wait()
            return
        if scope.cancelled_caught:
            raise StallError(f"{what()}: did not happen within {timeout_s:g} s")


class VersionClock:
    """The policy version the trainer and the admission rule go by.

    Example:
        >>> clock = VersionClock(start=3)
        >>> clock.tick(4)
        >>> clock.version
        4
    """

    def __init__(self, *, start: int = 0, changed: Signal | None = None) -> None:
        """Start at version `start`; `changed` is fired at each tick, shared with whoever waits for more than the clock."""
        self._version = start
        self._changed = changed or Signal()

    @property
    def version(self) -> int:
        """The version all serving servers have."""
        return self._version

    def tick(self, version: int) -> None:
        """Move to `version`.

        Raises:
            InvariantError: unless it is the next one.
        """
        if version != self._version + 1:
            raise InvariantError(f"the policy version must move from {self._version} to {self._version + 1}, got {version}")
        self._version = version
        self._changed.fire()
