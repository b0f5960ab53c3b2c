"""The groups of a simulated run, under the engine's own rules (`agentrl.engine.staleness`).

Invariant: each admitted group is consumed once, dropped once or still outstanding. Groups open and batches form exactly as
in `agentrl.engine.buffer.GroupBuffer`, which waits with events where this one is asked; a test plays both side by side.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from agentrl.engine.staleness import Admission, Candidate, Selection, StalenessPolicy, select


class SimulatedBuffer:
    """Every outstanding group, and the policy versions."""

    def __init__(self, admission: Admission, policy: StalenessPolicy) -> None:
        """Start empty, at version 0."""
        self._admission = admission
        self._policy: StalenessPolicy = policy
        self._outstanding: dict[int, Candidate] = {}
        self._complete = 0
        self._missing: frozenset[int] | None = None
        """Groups one of which must complete before a batch can form, where enough others are complete; None: unknown."""
        self.version = 0
        """Of the servers, from which admission counts."""
        self.trainer_version = 0
        """Of the trainer: `version`, or the next one while servers load it."""
        self.admitted = 0
        self.consumed = 0
        self.dropped = 0
        self.on_drop: Callable[[int], None] = lambda index: None
        """Called with each group that leaves for its age."""

    @property
    def outstanding(self) -> int:
        """Groups admitted and neither consumed nor dropped."""
        return len(self._outstanding)

    @property
    def may_admit(self) -> bool:
        """Whether one more group may open."""
        return self._admission.allows(opened=self.consumed + len(self._outstanding), version=self.version)

    def admit(self) -> int:
        """Open the next group and return its number; its version is the present one."""
        index = self.admitted
        self.admitted += 1
        self._outstanding[index] = Candidate(index=index, version=self.version, complete=False)
        return index

    def version_of(self, index: int) -> int:
        """Return the version at the admission of an open group."""
        return self._outstanding[index].version

    def complete(self, index: int, oldest: int) -> None:
        """Record that a group is complete, whose oldest token is of version `oldest`."""
        self._outstanding[index] = Candidate(index=index, version=oldest, complete=True)
        self._complete += 1
        if self._missing is not None and index in self._missing:
            self._missing = None

    def drop(self, index: int) -> None:
        """Drop an open group; another may take its place."""
        self._complete -= self._outstanding.pop(index).complete
        self.dropped += 1
        self._missing = None

    def is_ready(self) -> bool:
        """Return whether `take` would give a batch; policy `drop` first drops the groups that are over age."""
        if self._missing is not None:
            return False
        if self._policy != "drop" and self._complete < self._admission.groups_per_step:
            return False
        selection = self._select()
        for index in selection.drop:
            self.drop(index)
            self.on_drop(index)
        if not selection.take and self._complete >= self._admission.groups_per_step:
            self._missing = frozenset(selection.waits_for)
        return bool(selection.take)

    def take(self) -> tuple[int, ...]:
        """Remove and return the groups of the next batch, oldest first; empty where there is none."""
        if not self.is_ready():
            return ()
        taken = self._select().take
        for index in taken:
            del self._outstanding[index]
        self._complete -= len(taken)
        self.consumed += len(taken)
        return taken

    def stepped(self) -> None:
        """Record that the trainer has the next version."""
        self.trainer_version += 1
        self._missing = None

    def tick(self) -> None:
        """Record that the servers have the trainer's version."""
        self.version = self.trainer_version

    def counts(self) -> Counter[str]:
        """Return how many groups were admitted, consumed, dropped and are outstanding."""
        return Counter(
            admitted=self.admitted, consumed=self.consumed, dropped=self.dropped, outstanding=len(self._outstanding)
        )

    def _select(self) -> Selection:
        return select(
            list(self._outstanding.values()),
            version=self.trainer_version,
            groups_per_step=self._admission.groups_per_step,
            max_staleness=self._admission.max_staleness,
            policy=self._policy,
        )
