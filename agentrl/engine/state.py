"""The state that both sides of a run's loop share: versions, groups, episodes in flight, waits and records.

Invariant: each drop of a group is recorded, and whatever moves the run restarts its stall timer.
"""

from __future__ import annotations

from agentrl.engine.buffer import GroupBuffer, Signal, VersionClock
from agentrl.engine.inflight import InFlight, WatchedBackend
from agentrl.engine.journal import Journal
from agentrl.engine.parts import EngineParts
from agentrl.engine.staleness import Admission
from agentrl.observe.resuming import last_version
from agentrl.observe.stall import StallTimer, WaitBoard


class LoopState:
    """The shared state of one run, made from its parts."""

    def __init__(self, parts: EngineParts) -> None:
        self.board = WaitBoard()
        self.watchdog = StallTimer(timeout_s=parts.engine.stall_timeout_s, describe=self._describe_waits)
        self.flights = InFlight(on_progress=self.watchdog.progress)
        self.backend = WatchedBackend(parts.inference, self.flights)
        changed = Signal()
        self.clock = VersionClock(start=_first_version(parts), changed=changed)
        self.buffer = GroupBuffer(
            clock=self.clock,
            changed=changed,
            admission=Admission(
                groups_per_step=parts.algorithm.groups_per_step,
                max_staleness=parts.algorithm.max_staleness,
                first_version=self.clock.version,
                total_groups=max(0, parts.engine.steps - parts.resume.step) * parts.algorithm.groups_per_step,
            ),
            policy=parts.algorithm.staleness_policy,
            on_drop=self._dropped,
            first_index=parts.resume.groups_admitted,
            reopen=parts.resume.groups_open,
        )
        self.journal = Journal(parts, clock=self.clock, buffer=self.buffer, flights=self.flights, waits=self._waits)

    def _dropped(self, index: int, reason: str) -> None:
        self.journal.dropped(index, reason)

    def _waits(self) -> list[str]:
        return self.board.lines() + self.flights.describe(self.buffer.waits_for())

    def _describe_waits(self) -> str:
        return "\n".join(f"  {line}" for line in (*self._waits(), *self.backend.describe()))


def _first_version(parts: EngineParts) -> int:
    """Return the version of the run's first publication: at least 1, and above every version that the servers have had.

    Weights that a server was launched with are version 0, so a server that was restarted never passes for the run's. The
    weights of a checkpoint keep their version unless the run used later ones, whose weights were lost.
    """
    before = parts.resume.policy_version
    used = last_version(parts.run_dir) if parts.resume.step else 0
    return max(used + 1 if used > before else before, parts.inference.policy_version + 1)
