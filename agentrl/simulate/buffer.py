"""The groups of a simulated run: those of the engine's buffer (`agentrl.engine.staleness`), with its versions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from agentrl.engine.staleness import Admission, OutstandingGroups, StalenessPolicy


class SimulatedBuffer:
    """Every outstanding group, and the policy versions."""

    def __init__(self, admission: Admission, policy: StalenessPolicy) -> None:
        self._groups = OutstandingGroups(admission, policy)
        self.version = 0
        """Of the servers, from which admission counts."""
        self.trainer_version = 0
        """Of the trainer: `version`, or the next one while servers load it."""
        self.dropped = 0
        self.on_drop: Callable[[int], None] = lambda index: None
        """Called with each group that leaves for its age."""

    @property
    def outstanding(self) -> int:
        """Groups admitted and neither consumed nor dropped."""
        return len(self._groups)

    @property
    def may_admit(self) -> bool:
        return self._groups.may_admit(self.version)

    def admit(self) -> int:
        """Open the next group and return its number; its version is the present one."""
        return self._groups.admit(self.version)

    def version_of(self, index: int) -> int:
        """Return the version at the admission of an open group."""
        return self._groups.version_of(index)

    def complete(self, index: int, oldest: int) -> None:
        """Record that a group is complete, whose oldest token is of version `oldest`."""
        self._groups.complete(index, oldest)

    def drop(self, index: int) -> None:
        """Drop an open group; another may take its place."""
        self._groups.drop(index)
        self.dropped += 1

    def is_ready(self) -> bool:
        """Return whether `take` would give a batch; policy `drop` first drops the groups that are over age."""
        return self._groups.is_ready(self.trainer_version, self._drop_for_age)

    def take(self) -> tuple[int, ...]:
        """Remove and return the groups of the next batch, oldest first; empty where there is none."""
        return self._groups.take(self.trainer_version) if self.is_ready() else ()

    def stepped(self) -> None:
        """Record that the trainer has the next version."""
        self.trainer_version += 1

    def tick(self) -> None:
        """Record that the servers have the trainer's version."""
        self.version = self.trainer_version

    def counts(self) -> Counter[str]:
        """Return the numbers of groups that were admitted, consumed, dropped and are outstanding."""
        groups = self._groups
        return Counter(
            admitted=groups.num_admitted, consumed=groups.num_consumed, dropped=self.dropped, outstanding=len(groups)
        )

    def _drop_for_age(self, index: int) -> None:
        self.drop(index)
        self.on_drop(index)
