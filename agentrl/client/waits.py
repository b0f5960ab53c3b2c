"""The waits of an episode's calls for the policy: each ends with an answer, at its timeout, or when the workflow returns.

A workflow may return while calls run that nobody waits for, as after a race. Whether they had ended by then is a decision of
the policy, too, so they are given up like calls that the workflow cancels.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

import anyio

from agentrl.client.offline import call_timeout, left_running
from agentrl.concurrency import ending_quietly

Result = TypeVar("Result")


class CallWaits:
    """The waits that run; those that begin after `cut` are not cut."""

    def __init__(self, episode_id: str) -> None:
        self._episode_id = episode_id
        self._running: dict[anyio.CancelScope, anyio.Event] = {}
        self._was_cut = False

    async def bounded(
        self, call: Callable[[], Awaitable[Result]], timeout_s: float | None, remaining_s: float | None
    ) -> Result:
        """Return what `call` returns, within what remains of its timeout.

        Raises:
            CallTimeout: the timeout has passed.

        Cancellation: a wait that is cut ends as if it were cancelled.
        """
        ended = anyio.Event()
        with anyio.move_on_after(remaining_s) as wait:
            self._running[wait] = ended
            try:
                return await call()
            finally:
                del self._running[wait]
                ended.set()
        if self._was_cut:
            raise ending_quietly(left_running(self._episode_id))
        raise call_timeout(self._episode_id, timeout_s or 0.0)

    async def cut(self) -> None:
        """End all waits, and wait until what the calls had sampled is recorded."""
        self._was_cut = True
        running = dict(self._running)
        for wait in running:
            wait.cancel()
        for ended in running.values():
            await ended.wait()
