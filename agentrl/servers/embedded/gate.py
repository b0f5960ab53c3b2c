"""The state that decides whether the engine may step, and aborts, with SGLang's faults of aborts if switched on.

Invariant: the state changes only between two steps, because steps run inline on the event-loop thread; every change wakes
every waiting task, which then checks its condition again. A client's disconnect (`exact`) ends its own request and no other.
"""

from __future__ import annotations

import anyio

from agentrl.servers.embedded.core import Core
from agentrl.servers.embedded.faults import SGLangFault
from agentrl.servers.embedded.sequences import EngineSequence
from agentrl.servers.engine import EnginePauseMode


class Gate:
    """The pause and the admission of an engine, with a signal for every change."""

    def __init__(self) -> None:
        self.paused: EnginePauseMode | None = None
        self.draining = False
        """An update waits until the running requests end; no other request is admitted."""
        self.watched = 0
        """Number of tasks that need a notification after every step, not only when nothing runs."""
        self.stuck = False
        """No control call is answered again: `SGLangFault.ABORT_DEADLOCK` or `SGLangFault.UPDATE_COLLISION` happened."""
        self._changed = anyio.Event()

    def notify(self) -> None:
        """Wake every task that waits for a change."""
        event, self._changed = self._changed, anyio.Event()
        event.set()

    async def wait(self) -> None:
        """Wait for the next change, without limit. Cancellation: nothing is left behind."""
        await self._changed.wait()


class Aborts:
    """Ends requests."""

    def __init__(self, core: Core, gate: Gate, faults: frozenset[SGLangFault]) -> None:
        self._core, self._gate, self._faults = core, gate, faults
        self._late: list[EngineSequence] = []

    def abort(self, rid: str, *, abort_all: bool, exact: bool) -> int:
        """End the named requests with their partial output; return their number."""
        live = self._core.live
        if exact:
            chosen = [live[rid]] if rid in live else []
        else:
            named = [one for name, one in live.items() if abort_all or (rid and name.startswith(rid))]
            chosen = [one for one in named if self._reaches(one, abort_all=abort_all)]
        for one in chosen:
            if SGLangFault.COARSE_ABORTS in self._faults and one.row < 0 and not one.request.stream:
                one.round_down()
            self._core.abort(one)
        return len(chosen)

    def resumed(self) -> None:
        """Carry out the aborts that the pause delayed."""
        late, self._late = self._late, []
        for one in late:
            if self._core.live.get(one.request.rid) is one:
                self._core.abort(one)
        for one in self._core.waiting:
            one.parked = False

    def _reaches(self, one: EngineSequence, *, abort_all: bool) -> bool:
        if SGLangFault.LOST_ABORTS in self._faults:
            if one.parked:
                one.deaf = one.deaf or not abort_all
                return False
            if one.deaf and not abort_all:
                return False
        if SGLangFault.LATE_ABORTS in self._faults and self._gate.paused == "in_place" and one.row >= 0:
            self._late.append(one)
            return False
        return True
