"""The staleness bound as pure rules: when a group may open, and which groups a batch must hold.

Invariant: under `wait`, every token is trained at most `max_staleness` versions after it was sampled, and no group is
dropped for its age.

Why `wait` can always keep the bound. Let B be the groups of a batch, S the bound, v the version, and O(j) the number of
outstanding groups (admitted, not yet consumed) whose tokens may be of version v - S + j or older. Such a group must be
trained at version v + j at the latest, and a version trains B groups, so all groups can meet their deadlines exactly if

    O(j) <= B * (j + 1)   for j = 0 .. S                                                              (1)

Here v is the version of the trainer's weights, while admission counts from the version of the servers, which may be v - 1
(`engine.overlap_publication`). The first tokens of a group that opens are of the servers' version.

Admission (paper eq. 3) keeps (1) for j = S: group number n = consumed + outstanding opens only while
floor(n / B) <= v + S, and consumed = B * v, so at most B * (S + 1) are outstanding. Where the servers have v - 1, at most
B * S are, which keeps (1) for j = S - 1, the class of the new group. For j < S a batch keeps (1) for the next version, where
the classes shift by one, by holding at least O(j) - B * j groups of each class j. (1) itself says that this is at most B
groups, so such a batch exists once they have completed: the trainer waits for that, and for nothing else. Taking the
completed groups oldest first meets every class at once if any choice does.

Waiting only for the groups that are due *now* (class 0) is not enough: four slow groups of one version may fall due together
when B is 2, and admission does not prevent it. `tests/engine/test_staleness.py` has that schedule.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

StalenessPolicy: TypeAlias = Literal["wait", "mask", "drop"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """When the next group may open (AReaL, arXiv 2505.24298, eq. 3, counted in groups from 0).

    Example:
        >>> admission = Admission(groups_per_step=2, max_staleness=1)
        >>> [admission.allows(opened=n, version=0) for n in (3, 4)], admission.allows(opened=4, version=1)
        ([True, False], True)
    """

    groups_per_step: int
    max_staleness: int
    first_version: int = 0
    """Policy version when the run began; batches are counted from there."""
    total_groups: int | None = None
    """Groups the run will consume in all; no more are opened. None: no end."""
    is_demanded: bool = False
    """Others decide when a group opens, such as the users of an online run: it always may."""

    def allows(self, *, opened: int, version: int) -> bool:
        """Return whether one more group may open at policy `version`, when `opened` are consumed or outstanding."""
        if self.is_demanded:
            return True
        if self.total_groups is not None and opened >= self.total_groups:
            return False
        return opened // self.groups_per_step <= version - self.first_version + self.max_staleness


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """An outstanding group and its age."""

    index: int
    """Admission number."""
    version: int
    """No token of the group is older: the oldest sampled one once it is complete, the version at admission before."""
    complete: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """The trainer's next step; `take` is empty until a whole batch may be trained."""

    take: tuple[int, ...] = ()
    """Groups of the batch, oldest first."""
    drop: tuple[int, ...] = ()
    """Groups that are over age and leave, whether or not there is a batch."""
    waits_for: tuple[int, ...] = ()
    """Groups some of which must complete first; empty when no group is outstanding."""


def select(
    candidates: Sequence[Candidate], *, version: int, groups_per_step: int, max_staleness: int, policy: StalenessPolicy
) -> Selection:
    """Return the batch to train at `version`, or the groups to wait for, of all outstanding `candidates`.

    `wait`: see the module. `mask`: the oldest completed groups, whatever their age (the caller masks tokens). `drop`:
    completed groups with an over-age token leave; the oldest of the others are the batch.

    Example:
        >>> slow, fast = Candidate(index=0, version=0, complete=False), Candidate(index=1, version=0, complete=True)
        >>> select([slow, fast], version=1, groups_per_step=1, max_staleness=2, policy="wait").take
        (1,)
        >>> select([slow, fast], version=2, groups_per_step=1, max_staleness=2, policy="wait").waits_for
        (0,)
    """
    ordered = sorted(candidates, key=lambda c: (c.version, c.index))
    complete = [c for c in ordered if c.complete]
    running = [c for c in ordered if not c.complete]
    over_age = [c for c in complete if c.version < version - max_staleness] if policy == "drop" else []
    if over_age:
        complete = [c for c in complete if c.version >= version - max_staleness]
    dropped = tuple(c.index for c in over_age)
    batch = complete[:groups_per_step]
    if len(batch) < groups_per_step:
        return Selection(drop=dropped, waits_for=tuple(c.index for c in running))
    if policy == "wait":
        for age_class in range(max_staleness + 1):
            limit = version - max_staleness + age_class
            due = sum(c.version <= limit for c in ordered) - age_class * groups_per_step
            if sum(c.version <= limit for c in batch) < due:
                return Selection(waits_for=tuple(c.index for c in running if c.version <= limit))
    return Selection(take=tuple(c.index for c in batch), drop=dropped)


class OutstandingGroups:
    """Every outstanding group by its number and age; nothing here waits, and the caller keeps the version."""

    def __init__(
        self, admission: Admission, policy: StalenessPolicy, *, first_index: int = 0, reopen: Sequence[int] = ()
    ) -> None:
        """Start empty; `reopen` are numbers that are handed out before `first_index`."""
        self._admission = admission
        self._policy: StalenessPolicy = policy
        self._outstanding: dict[int, Candidate] = {}
        self._reopen = deque(sorted(reopen))
        self._missing: tuple[int, frozenset[int]] | None = None
        """A version, and the groups one of which must complete before it trains a batch; None: unknown."""
        self.num_complete = 0
        """Groups that could be trained."""
        self.num_admitted = first_index
        """The next new group gets this number."""
        self.num_consumed = 0

    def __len__(self) -> int:
        """Return the number of groups admitted and neither consumed nor dropped."""
        return len(self._outstanding)

    def __contains__(self, index: int) -> bool:
        return index in self._outstanding

    @property
    def open_indices(self) -> tuple[int, ...]:
        """Numbers of the groups that are neither consumed nor dropped, those that wait to be reopened included."""
        return tuple(sorted((*self._outstanding, *self._reopen)))

    def may_admit(self, version: int) -> bool:
        """Return whether one more group may open while the servers have `version`."""
        return self._admission.allows(opened=self.num_consumed + len(self._outstanding), version=version)

    def admit(self, version: int) -> int:
        """Open the next group at the version of the servers, and return its number."""
        if self._reopen:
            index = self._reopen.popleft()
        else:
            index, self.num_admitted = self.num_admitted, self.num_admitted + 1
        self._outstanding[index] = Candidate(index=index, version=version, complete=False)
        return index

    def version_of(self, index: int) -> int:
        """Return the version at the admission of an open group, or of the oldest token of a complete one."""
        return self._outstanding[index].version

    def complete(self, index: int, oldest: int) -> None:
        """Record that a group is complete, whose oldest token is of version `oldest`."""
        self._outstanding[index] = Candidate(index=index, version=oldest, complete=True)
        self.num_complete += 1
        if self._missing is not None and index in self._missing[1]:
            self._missing = None

    def drop(self, index: int) -> None:
        """Drop a group; another may take its place."""
        self.num_complete -= self._outstanding.pop(index).complete
        self._missing = None

    def is_ready(self, version: int, drop: Callable[[int], object]) -> bool:
        """Return whether a batch can be trained from `version`; policy `drop` first drops over-age groups by `drop`."""
        if self._policy != "drop":  # which may have groups to drop in any case
            if self._missing is not None and self._missing[0] == version:
                return False
            if self.num_complete < self._admission.groups_per_step:
                return False
        selection = self.select(version)
        for index in selection.drop:
            drop(index)
        if not selection.take and self.num_complete >= self._admission.groups_per_step:
            self._missing = version, frozenset(selection.waits_for)
        return bool(selection.take)

    def take(self, version: int) -> tuple[int, ...]:
        """Remove and return the groups of the batch that is trained from `version`, oldest first."""
        taken = self.select(version).take
        for index in taken:
            del self._outstanding[index]
        self.num_complete -= len(taken)
        self.num_consumed += len(taken)
        return taken

    def select(self, version: int) -> Selection:
        """Return the trainer's next step from `version` of the weights."""
        return select(
            list(self._outstanding.values()),
            version=version,
            groups_per_step=self._admission.groups_per_step,
            max_staleness=self._admission.max_staleness,
            policy=self._policy,
        )
