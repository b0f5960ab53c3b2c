"""The state that decides whether the engine may step: pauses, updates that wait, and the news of changes.

Invariant: it changes between two steps only, because steps run inline on the event-loop thread; whoever waits for a change
is woken by every change, and looks again.

Which requests an abort ends, and when; here are the hazards of SGLang's aborts, where they are switched on.

Invariant: a client's disconnect (`exact`) always ends its own request and no other.
"""

from __future__ import annotations

import anyio

from agentrl.servers.embedded.core import Core
from agentrl.servers.embedded.faults import SGLangFault
from agentrl.servers.embedded.sequences import EngineSequence
from agentrl.servers.engine import EnginePauseMode


class Gate:
    """Whether the engine runs, admits and is watched."""

    def __init__(self) -> None:
        self.paused: EnginePauseMode | None = None
        self.draining = False
        """An update waits for running requests to end; no other one is admitted."""
        self.watched = 0
        """Waits that want to hear of every step, not only of the last."""
        self.stuck = False
        """No control call is answered again: `SGLangFault.ABORT_DEADLOCK` or `SGLangFault.UPDATE_COLLISION` happened."""
        self._changed = anyio.Event()

    def notify(self) -> None:
        """Wake whoever waits for a change."""
        event, self._changed = self._changed, anyio.Event()
        event.set()

    async def wait(self) -> None:
        """Wait for the next change, without limit. Cancellation: nothing is left behind."""
        await self._changed.wait()


class Aborts:
    """Ends requests.

    Args:
        core: holds them.
        gate: says whether the engine is paused.
        faults: hazards switched on.
    """

    def __init__(self, core: Core, gate: Gate, faults: frozenset[SGLangFault]) -> None:
        self._core, self._gate, self._faults = core, gate, faults
        self._late: list[EngineSequence] = []

    def abort(self, rid: str, *, abort_all: bool, exact: bool) -> int:
        """End the named requests with what they have; return how many. See `InferenceEngine.abort`."""
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
        """Deliver what a pause held back."""
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
