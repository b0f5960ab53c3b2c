"""The simulated servers together: an episode stays with its server, a new one goes to the server with the least load.

Invariant: every server is up to date when anything about it changes, and has one planned end at a time.
"""

from __future__ import annotations

from collections.abc import Sequence

from agentrl.simulate.cores import SharedCores
from agentrl.simulate.costs.model import CostModel
from agentrl.simulate.events import EventQueue
from agentrl.simulate.servers import SimulatedCall, SimulatedServer

_CALL = 1 << 20
"""Weight of a call over that of an episode, in the order in which servers are chosen."""


class SimulatedPool:
    """Runs the calls of a simulated run."""

    def __init__(self, events: EventQueue, cores: SharedCores, costs: CostModel, servers: int) -> None:
        self._events, self._cores, self._threads = events, cores, costs.host.server_threads
        cost = costs.server
        cores.on_speed = self._change_speed
        self._servers = [SimulatedServer(cost) for _ in range(servers)]
        self._plans = [0] * servers
        self._loads = [0] * servers
        """Calls of each server times `_CALL`, plus its episodes."""
        self._paused = False

    @property
    def version(self) -> int:
        """The version that samples."""
        return self._servers[0].version

    @property
    def servers(self) -> Sequence[SimulatedServer]:
        """All servers, with what they have done until now."""
        for server in self._servers:
            server.advance(self._events.now)
        return self._servers

    def choose(self) -> int:
        """Return the server for a new episode: the one with the fewest calls, then with the fewest episodes."""
        chosen = self._loads.index(min(self._loads))
        self._loads[chosen] += 1
        return chosen

    def release(self, at: int) -> None:
        self._loads[at] -= 1

    def call(self, at: int, call: SimulatedCall) -> None:
        server = self._servers[at]
        server.advance(self._events.now)
        server.add(call)
        self._loads[at] += _CALL
        self._plan(at)
        self._count_busy()

    def abort(self, at: int, call: SimulatedCall) -> None:
        """End a call of server `at` before it has its tokens."""
        server = self._servers[at]
        server.advance(self._events.now)
        server.remove(call)
        self._loads[at] -= _CALL
        self._plan(at)
        self._count_busy()

    def set_paused(self, paused: bool) -> None:
        self._paused = paused
        self._change_speed()
        self._count_busy()

    def take_version(self, version: int, *, rereads: bool) -> None:
        for at, server in enumerate(self._servers):
            server.advance(self._events.now)
            server.take_version(version, rereads=rereads)
            self._plan(at)

    def _change_speed(self) -> None:
        speed = 0.0 if self._paused else self._cores.speed
        for at, server in enumerate(self._servers):
            server.advance(self._events.now)
            server.set_speed(speed)
            self._plan(at)

    def _count_busy(self) -> None:
        busy = 0 if self._paused else sum(server.is_busy for server in self._servers)
        self._cores.set_serving(busy * self._threads)

    def _plan(self, at: int) -> None:
        self._plans[at] += 1
        ends_at, plan = self._servers[at].next_end(), self._plans[at]
        if ends_at is not None:
            self._events.plan(ends_at - self._events.now, lambda: self._end(at, plan))

    def _end(self, at: int, plan: int) -> None:
        if plan != self._plans[at]:
            return  # something has changed since
        server = self._servers[at]
        server.advance(self._events.now)
        call = server.end_first()
        self._loads[at] -= _CALL
        self._plan(at)
        self._count_busy()
        call.on_end()
