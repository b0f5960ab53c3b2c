"""What the servers of a pool are doing, for progress displays and stall reports.

Invariant: a status is of one moment; nothing in it changes afterwards.
"""

from __future__ import annotations

from dataclasses import dataclass

from agentrl.inference.roster import Roster, State


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerStatus:
    """One server, for progress displays and stall reports."""

    url: str
    state: State
    version: int
    in_flight: int
    """Model calls that wait for it."""
    sessions: int
    """Episodes at home on it."""
    paused: bool
    reason: str
    """Why it does not serve; empty where it does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolStatus:
    """The pool at one moment."""

    version: int
    updating: bool
    in_flight: int
    servers: tuple[ServerStatus, ...]

    def __str__(self) -> str:
        parts = [
            f"{s.url} {s.state}{' paused' if s.paused else ''} v{s.version}, {s.in_flight} in flight"
            + (f" ({s.reason})" if s.reason else "")
            for s in self.servers
        ]
        return f"version {self.version}{', updating weights' if self.updating else ''}: " + "; ".join(parts)


def describe(roster: Roster, *, updating: bool) -> PoolStatus:
    """Return what each server of a roster is doing now, `updating` their weights or not."""
    return PoolStatus(
        version=roster.version,
        updating=updating,
        in_flight=sum(member.in_flight for member in roster.members),
        servers=tuple(
            ServerStatus(
                url=member.url,
                state=member.state,
                version=member.server.version,
                in_flight=member.in_flight,
                sessions=member.sessions,
                paused=member.server.paused,
                reason=member.reason,
            )
            for member in roster.members
        ),
    )
