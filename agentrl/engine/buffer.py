"""The groups of a run from admission to consumption, and the waits of those who open and those who train them.

Invariant: every group admitted is consumed once, dropped once with a counted reason, or still outstanding. The dispatcher
waits in `admit` for the trainer (a version) or for a dropped group's place; the trainer waits in `take` for the groups it
must have. Closing ends both waits: that is the shutdown protocol.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from agentrl.engine.clock import Signal, VersionClock
from agentrl.engine.staleness import Admission, Candidate, Selection, StalenessPolicy, select
from agentrl.errors import InvariantError, StaleDataError
from agentrl.types import Group


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticket:
    """Leave to open one group."""

    index: int
    """Its admission number."""
    version: int
    """Policy version at admission."""


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
            changed: the signal `clock` fires; the buffer fires it too.
            admission: when groups may open, and the size of a batch.
            policy: how the staleness bound is enforced.
            on_drop: called with number and reason of each group that is dropped, for its age included.
            first_index: number of the first group that was never opened before.
            reopen: numbers below it that are given out first: groups an earlier process left open.
        """
        self._on_drop = on_drop
        self._clock = clock
        self._changed = changed
        self._admission = admission
        self._policy: StalenessPolicy = policy
        self._outstanding: dict[int, Ticket] = {}
        self._complete: dict[int, Group] = {}
        self._oldest: dict[int, int] = {}
        self._admitted = first_index
        self._reopen = deque(sorted(reopen))
        self._consumed = 0
        self._dropped: Counter[str] = Counter()
        self._closed = False

    @property
    def num_outstanding(self) -> int:
        """Groups admitted and neither consumed nor dropped."""
        return len(self._outstanding)

    @property
    def num_complete(self) -> int:
        """Groups that could be trained."""
        return len(self._complete)

    @property
    def num_admitted(self) -> int:
        """Groups opened in the run, by earlier processes included; the next new one has this number."""
        return self._admitted

    @property
    def open_indices(self) -> tuple[int, ...]:
        """Numbers of the groups that are neither consumed nor dropped, those still to be opened anew included."""
        return tuple(sorted((*self._outstanding, *self._reopen)))

    @property
    def dropped(self) -> Mapping[str, int]:
        """Groups that left untrained, by reason."""
        return dict(self._dropped)

    @property
    def may_admit(self) -> bool:
        """Whether `admit` would return at once."""
        opened = self._consumed + len(self._outstanding)
        return self._admission.allows(opened=opened, version=self._clock.version)

    async def admit(self) -> Ticket | None:
        """Return leave to open the next group, once the staleness bound allows it; None when the buffer is closed.

        Cancellation: no group is admitted.
        """
        await self._changed.wait_until(
            lambda: self._closed or self.may_admit, timeout_s=None, what=lambda: "the dispatcher waits to open a group"
        )
        if self._closed:
            return None
        if self._reopen:
            index = self._reopen.popleft()
        else:
            index = self._admitted
            self._admitted += 1
        ticket = Ticket(index=index, version=self._clock.version)
        self._outstanding[ticket.index] = ticket
        return ticket

    def complete(self, group: Group) -> None:
        """Take over a finished group.

        Raises:
            InvariantError: when it was not admitted, or is complete, consumed or dropped already.
        """
        self._owned(group.index, "complete")
        if group.index in self._complete:
            raise InvariantError(f"group {group.index} was completed twice")
        self._complete[group.index] = group
        self._oldest[group.index] = group.min_version()
        self._changed.fire()

    def drop(self, index: int, reason: str) -> None:
        """Let an outstanding group go, counted under `reason`; its place may be taken by another.

        Raises:
            InvariantError: when it is not outstanding.
        """
        self._owned(index, "drop")
        del self._outstanding[index]
        self._complete.pop(index, None)
        self._oldest.pop(index, None)
        self._dropped[reason] += 1
        if self._on_drop is not None:
            self._on_drop(index, reason)
        self._changed.fire()

    async def take(self, *, timeout_s: float | None = None) -> tuple[Group, ...] | None:
        """Return the next batch, oldest group first, and forget it; None when the buffer is closed.

        Over-age groups leave first under policy `drop`.

        Args:
            timeout_s: the longest wait, seconds; None where the run's watchdog is the deadline.

        Raises:
            StallError: when no batch came together in time; the message names the groups waited for.
            StaleDataError: when a group is over age under policy `wait`, which the rule excludes.

        Cancellation: no group is consumed.
        """
        await self._changed.wait_until(self._ready, timeout_s=timeout_s, what=self.describe_wait)
        if self._closed:
            return None
        selection = self._select()
        groups = tuple(self._complete.pop(index) for index in selection.take)
        for group in groups:
            del self._outstanding[group.index], self._oldest[group.index]
        self._consumed += len(groups)
        if self._policy != "mask":
            self._check_age(groups)
        self._changed.fire()
        return groups

    def close(self) -> None:
        """End all waits; groups that complete later are refused."""
        self._closed = True
        self._changed.fire()

    def waits_for(self) -> tuple[int, ...]:
        """Return the groups the trainer would have to wait for now; empty when it need not, or none is outstanding."""
        return self._select().waits_for

    def describe_wait(self) -> str:
        """Return what the trainer waits for, in words."""
        have, need = len(self._complete), self._admission.groups_per_step
        missing = self.waits_for()
        shown = ", ".join(map(str, missing[:8])) + (" ..." if len(missing) > 8 else "")
        due = " that are due under the staleness bound" if have >= need else ""
        return f"{have} of {need} groups are complete; missing: {f'groups {shown}{due}' if missing else 'no group is open'}"

    def _ready(self) -> bool:
        if self._closed:
            return True
        selection = self._select()
        for index in selection.drop:
            self.drop(index, "over_age")
        return bool(selection.take)

    def _select(self) -> Selection:
        candidates = [
            Candidate(index=index, version=self._oldest.get(index, ticket.version), complete=index in self._complete)
            for index, ticket in self._outstanding.items()
        ]
        return select(
            candidates,
            version=self._clock.version,
            groups_per_step=self._admission.groups_per_step,
            max_staleness=self._admission.max_staleness,
            policy=self._policy,
        )

    def _owned(self, index: int, action: str) -> None:
        if index not in self._outstanding:
            known = "was consumed or dropped before" if index < self._admitted else "was never admitted"
            raise InvariantError(f"cannot {action} group {index}: it {known}")

    def _check_age(self, groups: tuple[Group, ...]) -> None:
        limit = self._clock.version - self._admission.max_staleness
        for group in groups:
            if group.min_version() < limit:
                raise StaleDataError(
                    f"group {group.index} (admitted at version {group.admitted_version}) has tokens of version "
                    f"{group.min_version()}, but at version {self._clock.version} the oldest allowed is {limit}"
                )
