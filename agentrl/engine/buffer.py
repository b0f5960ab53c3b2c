"""The groups of a run between admission and training, and the policy version that admits them.

Invariant: each admitted group is consumed once, dropped once with a counted reason, or still outstanding. The policy
versions only grow, the trainer's by one for each step, the servers' by one for each published update, which comes before the
next one of the trainer. Each wait (`admit`, `take`) is an event, never a poll, and `close` ends it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import anyio

from agentrl.engine.staleness import Admission, OutstandingGroups, StalenessPolicy
from agentrl.errors import InvariantError, StallError
from agentrl.types import Group


class Signal:
    """An event that tasks can wait for again and again; `fire` wakes every task that waits at that moment."""

    def __init__(self) -> None:
        self._event = anyio.Event()

    def fire(self) -> None:
        self._event.set()
        self._event = anyio.Event()

    async def wait(self) -> None:
        await self._event.wait()

    async def wait_until(self, holds: Callable[[], bool], *, timeout_s: float | None, what: Callable[[], str]) -> None:
        """Return once `holds()` is true, now or after a `fire`; raises StallError after `timeout_s` seconds."""
        with anyio.move_on_after(timeout_s) as scope:
            while not holds():
                await self.wait()
            return
        if scope.cancelled_caught:
            raise StallError(f"{what()}: this did not end within {timeout_s:g} s")


class VersionClock:
    """The policy versions of the servers, from which admission counts, and of the trainer, which may be one ahead.

    Example:
        >>> clock = VersionClock(start=3)
        >>> clock.stepped()
        >>> clock.version, clock.trainer_version
        (3, 4)
        >>> clock.tick(4)
        >>> clock.version
        4
    """

    def __init__(self, *, start: int = 0, changed: Signal | None = None) -> None:
        self._version = self._trainer_version = start
        self._changed = changed or Signal()

    @property
    def version(self) -> int:
        """The version that every serving server holds."""
        return self._version

    @property
    def trainer_version(self) -> int:
        """The version of the trainer's weights: `version`, or the next one until every serving server holds it."""
        return self._trainer_version

    def stepped(self) -> None:
        """Record that the trainer's weights are the next version from now on."""
        if self._trainer_version != self._version:
            raise InvariantError(
                f"the trainer stepped from version {self._trainer_version}, but the servers hold version {self._version}"
            )
        self._trainer_version += 1
        self._changed.fire()

    def tick(self, version: int) -> None:
        """Record that every serving server holds `version`, the trainer's."""
        if version != self._version + 1 or version != self._trainer_version:
            raise InvariantError(
                f"the policy version must move from {self._version} to {self._version + 1} after a step of the trainer, "
                f"which has version {self._trainer_version}; got {version}"
            )
        self._version = version
        self._changed.fire()


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticket:
    """Permission to open one group."""

    index: int
    """Its admission number."""
    version: int
    """Policy version of the servers at admission."""


class GroupBuffer:
    """Owns every outstanding group. Single-threaded: state changes never await."""

    def __init__(
        self,
        *,
        clock: VersionClock,
        changed: Signal,
        admission: Admission,
        policy: StalenessPolicy = "wait",
        on_drop: Callable[[int, str], None] | None = None,
        first_index: int = 0,
        reopen: Sequence[int] = (),
    ) -> None:
        """Start empty.

        Args:
            clock: the policy version.
            changed: the signal that `clock` fires; the buffer fires it too.
            admission: when groups may open, and the size of a batch.
            policy: how the staleness bound is enforced.
            on_drop: called with the number and the reason of each dropped group, over-age groups included.
            first_index: number of the first group that was never opened before.
            reopen: smaller numbers that `admit` hands out first: groups that an earlier process left open.
        """
        self._on_drop = on_drop
        self._clock = clock
        self._changed = changed
        self._groups_per_step = admission.groups_per_step
        self._groups = OutstandingGroups(admission, policy, first_index=first_index, reopen=reopen)
        self._complete: dict[int, Group] = {}
        self._dropped: Counter[str] = Counter()
        self._condemned: dict[int, str] = {}
        self._closed = False
        self.is_awaited = False
        """Whether the trainer waits for a batch."""

    @property
    def num_outstanding(self) -> int:
        """Groups admitted and neither consumed nor dropped."""
        return len(self._groups)

    @property
    def num_complete(self) -> int:
        """Groups that could be trained."""
        return len(self._complete)

    @property
    def num_admitted(self) -> int:
        """Groups opened in the run, those of earlier processes included; the next new group gets this number."""
        return self._groups.num_admitted

    @property
    def open_indices(self) -> tuple[int, ...]:
        """Numbers of the groups that are neither consumed nor dropped, those that wait to be reopened included."""
        return self._groups.open_indices

    @property
    def dropped(self) -> Mapping[str, int]:
        """Number of groups dropped untrained, by reason."""
        return dict(self._dropped)

    @property
    def may_admit(self) -> bool:
        """Whether `admit` would return at once."""
        return self._groups.may_admit(self._clock.version)

    async def admit(self) -> Ticket | None:
        """Return a ticket for the next group once the staleness bound allows it; None when the buffer is closed."""
        await self._changed.wait_until(
            lambda: self._closed or self.may_admit, timeout_s=None, what=lambda: "the dispatcher waits to open a group"
        )
        return self.admit_now()

    def admit_now(self) -> Ticket | None:
        """Return a ticket for a group that opens whatever the staleness bound says; None when the buffer is closed."""
        if self._closed:
            return None
        version = self._clock.version
        return Ticket(index=self._groups.admit(version), version=version)

    async def closed(self) -> None:
        """Return when the buffer is closed."""
        await self._changed.wait_until(lambda: self._closed, timeout_s=None, what=self.describe_wait)

    def complete(self, group: Group) -> None:
        """Store a finished group until a batch takes it."""
        self._owned(group.index, "complete")
        if group.index in self._complete:
            raise InvariantError(f"group {group.index} was completed twice")
        if group.index in self._condemned:
            self.drop(group.index, self._condemned[group.index])
            return
        self._complete[group.index] = group
        self._groups.complete(group.index, group.min_version())
        self._changed.fire()

    def drop(self, index: int, reason: str) -> None:
        """Drop an outstanding group, counted under `reason`; another group may take its place."""
        self._owned(index, "drop")
        self._groups.drop(index)
        self._complete.pop(index, None)
        self._condemned.pop(index, None)
        self._dropped[reason] += 1
        if self._on_drop is not None:
            self._on_drop(index, reason)
        self._changed.fire()

    def condemn(self, indices: Iterable[int], reason: str) -> int:
        """Drop the outstanding ones of the groups, now or when they complete; return their number."""
        outstanding = [index for index in indices if index in self._groups]
        for index in outstanding:
            if index in self._complete:
                self.drop(index, reason)
            else:
                self._condemned[index] = reason
        return len(outstanding)

    async def ready(self) -> None:
        """Return once `take` would return at once; raises and is cancelled as `take`."""
        self.is_awaited = True
        try:
            await self._changed.wait_until(self._ready, timeout_s=None, what=self.describe_wait)
        finally:
            self.is_awaited = False

    async def take(self, *, timeout_s: float | None = None) -> tuple[Group, ...] | None:
        """Return the groups of the next batch, oldest first, and remove them; None when the buffer is closed.

        Policy `drop` first drops the groups that are over age. Raises StallError, which names the missing groups, after
        `timeout_s` seconds; None: the run's stall timer is the deadline.

        Cancellation: no group is consumed.
        """
        await self._changed.wait_until(self._ready, timeout_s=timeout_s, what=self.describe_wait)
        if self._closed:
            return None
        groups = tuple(self._complete.pop(index) for index in self._groups.take(self._clock.trainer_version))
        self._changed.fire()
        return groups

    def close(self) -> None:
        self._closed = True
        self._changed.fire()

    def waits_for(self) -> tuple[int, ...]:
        """Return the groups that the trainer would wait for now; empty when a batch is ready or no group is outstanding."""
        return self._groups.select(self._clock.trainer_version).waits_for

    def describe_wait(self) -> str:
        have, need = len(self._complete), self._groups_per_step
        missing = self.waits_for()
        shown = ", ".join(map(str, missing[:8])) + (" ..." if len(missing) > 8 else "")
        due = " that are due under the staleness bound" if have >= need else ""
        return f"{have} of {need} groups are complete; missing: {f'groups {shown}{due}' if missing else 'no group is open'}"

    def _ready(self) -> bool:
        if self._closed:
            return True
        return self._groups.is_ready(self._clock.trainer_version, lambda index: self.drop(index, "over_age"))

    def _owned(self, index: int, action: str) -> None:
        if index not in self._groups:
            known = "was consumed or dropped before" if index < self._groups.num_admitted else "was never admitted"
            raise InvariantError(f"cannot {action} group {index}: it {known}")
