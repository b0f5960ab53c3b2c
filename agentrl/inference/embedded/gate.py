"""The state that decides whether the engine may step: pauses, updates that wait, and the news of changes.

Invariant: it changes between two steps only, because steps run inline on the event-loop thread; whoever waits for a change
is woken by every change, and looks again.
"""

from __future__ import annotations

import anyio

from agentrl.inference.engine import PauseMode


class Gate:
    """Whether the engine runs, admits and is watched."""

    def __init__(self) -> None:
        self.paused: PauseMode | None = None
        self.draining = False
        """An update waits for running requests to end; no other one is admitted."""
        self.watched = 0
        """Waits that want to hear of every step, not only of the last."""
        self.stuck = False
        """No control call is answered any more, for ever; see `Hazard.ABORT_DEADLOCK` and `Hazard.UPDATE_COLLISION`."""
        self._changed = anyio.Event()

    def notify(self) -> None:
        """Wake whoever waits for a change."""
        event, self._changed = self._changed, anyio.Event()
        event.set()

    async def wait(self) -> None:
        """Wait for the next change, without limit. Cancellation: nothing is left behind."""
        await self._changed.wait()
