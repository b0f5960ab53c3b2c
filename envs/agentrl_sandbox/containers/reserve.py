"""The room of a host that stays free for the second environments of episodes, which hold a first one meanwhile.

Invariant: a host that opens a first environment keeps room for the largest second one that its firsts may open. A second
one waits for no other while it is open. So each gets its turn, and episodes that hold one environment never wait for each
other for ever, however full the host is and whichever runs they belong to.
"""

from __future__ import annotations

from typing import NamedTuple

from agentrl_sandbox.containers.protocol import BenchRole


class Reserve(NamedTuple):
    """Room that stays free."""

    places: int
    memory_mb: float


class OpenRoles(NamedTuple):
    """What is open on a host, or is being opened there, by its part in an episode; memory in MiB, as it counts there."""

    num_seconds: int = 0
    seconds_mb: float = 0.0
    spare_mb: float = 0.0
    """Of the largest first one; 0: there is none."""

    def plus(self, role: BenchRole, memory_mb: float) -> OpenRoles:
        """Return the same with a further environment."""
        if role == "second":
            return self._replace(num_seconds=self.num_seconds + 1, seconds_mb=self.seconds_mb + memory_mb)
        return self._replace(spare_mb=max(self.spare_mb, memory_mb)) if role == "first" else self

    def reserve_beside(self, role: BenchRole, memory_mb: float) -> Reserve:
        """Return what has to stay free beside a further environment; for a second one nothing, as it is what that is for.

        Example:
            >>> OpenRoles().reserve_beside("first", 64), OpenRoles(num_seconds=1, seconds_mb=64).reserve_beside("first", 64)
            (Reserve(places=1, memory_mb=64), Reserve(places=0, memory_mb=0.0))
        """
        if role == "second":
            return Reserve(0, 0.0)
        spare_mb = self.plus(role, memory_mb).spare_mb
        return Reserve(int(spare_mb > 0 and not self.num_seconds), max(0.0, spare_mb - self.seconds_mb))
