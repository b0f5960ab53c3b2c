"""Inference servers in virtual time, and the pool of them. Requests that run together share a server's speed, others wait.

Invariant: a request gets exactly its work, in the order in which the server took it up; the sum of tokens over all versions
of a request is its output. One number, the work of a request present from the beginning, tells when each request ends.

An episode stays with its server, a new one goes to the server with the least load. Every server is up to date when anything
about it changes, and has one planned end at a time.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from agentrl_simulate.costs import CostModel, ServerCost
from agentrl_simulate.events import EventQueue, SharedCores, SimulatedDriver

_CALL = 1 << 20
"""Weight of a call over that of an episode, in the order in which servers are chosen."""


@dataclass(slots=True, eq=False)
class SimulatedCall:
    """One model call."""

    context_tokens: int
    """Tokens that the server reads before it samples."""
    output_tokens: int
    history_tokens: int
    """Tokens of the conversation before the call, which a server keeps until an update that makes it read them again."""
    history_version: int
    """Version whose weights have read them."""
    on_end: Callable[[], None]
    tokens: Counter[int] = field(default_factory=Counter[int])
    """Sampled tokens by policy version."""
    reading: float = 0.0
    """Work of reading, in sampled tokens."""
    begun_at: float = 0.0
    """The server's work when it began."""
    version: int = 0
    """Version that samples its tokens now."""


class SimulatedServer:
    """One server; its owner advances it before each change and asks when the next request ends."""

    def __init__(self, cost: ServerCost) -> None:
        self._cost = cost
        self._running: list[tuple[float, int, SimulatedCall]] = []
        self._waiting: deque[SimulatedCall] = deque()
        self._taken = 0
        self._work = 0.0
        self._now = 0.0
        self._speed = 1.0
        self._read_since = 0
        """The first version whose reading is still of use."""
        self.version = 0
        self.sampled = 0.0
        """Work done for requests, in sampled tokens."""
        self.busy_s = 0.0
        """Seconds with a running request."""

    def advance(self, now: float) -> None:
        elapsed, self._now = now - self._now, now
        if self._running and self._speed:
            done = elapsed / self._token_s()
            self._work += done
            self.sampled += done * len(self._running)
            self.busy_s += elapsed

    @property
    def is_busy(self) -> bool:
        return bool(self._running)

    def add(self, call: SimulatedCall) -> None:
        """Take up a call, or queue it while as many run as the server allows."""
        self._waiting.append(call)
        self._fill()

    def next_end(self) -> float | None:
        """Return when the next request ends if nothing changes; None while none runs or the server is paused."""
        if not self._running or not self._speed:
            return None
        return self._now + max(0.0, self._running[0][0] - self._work) * self._token_s()

    def end_first(self) -> SimulatedCall:
        """Remove and return the request that ends now."""
        ends_at, _, call = heapq.heappop(self._running)
        self._work = max(self._work, ends_at)
        call.tokens[call.version] += call.output_tokens - sum(call.tokens.values())
        self._fill()
        return call

    def remove(self, call: SimulatedCall) -> None:
        if call in self._waiting:
            self._waiting.remove(call)
        self._running = [entry for entry in self._running if entry[2] is not call]
        heapq.heapify(self._running)
        self._fill()

    def set_speed(self, speed: float) -> None:
        """Sample at `speed` times the usual speed from now on; 0 pauses the server."""
        self._speed = speed

    def take_version(self, version: int, *, rereads: bool, keeps: int | None = None) -> None:
        """Sample with new weights from now on; `rereads`: what was read under the former ones must be read again.

        Calls of version `keeps` or newer end with theirs; None: no call does.
        """
        if rereads:
            self._read_since = version
        again: list[tuple[float, int, SimulatedCall]] = []
        for ends_at, number, call in self._running:
            if keeps is not None and call.version >= keeps:
                again.append((ends_at, number, call))
                continue
            done = max(0.0, self._work - call.begun_at - call.reading)
            sampled = min(float(call.output_tokens), done)
            new = int(sampled) - sum(call.tokens.values())
            if new > 0:
                call.tokens[call.version] += new
            call.version = version
            extra = 0.0
            if rereads:
                extra = self._cost.context_weight * (call.history_tokens + call.context_tokens + sampled)
                call.reading += extra
            again.append((ends_at + extra, number, call))
        heapq.heapify(again)
        self._running = again
        self.version = version

    def _token_s(self) -> float:
        return self._cost.seconds_per_token(len(self._running)) / self._speed

    def _fill(self) -> None:
        limit = self._cost.requests
        while self._waiting and (limit is None or len(self._running) < limit):
            call = self._waiting.popleft()
            call.begun_at, call.version = self._work, self.version
            again = call.history_tokens if call.history_version < self._read_since else 0
            call.reading = self._cost.context_weight * (call.context_tokens + again)
            self._taken += 1
            heapq.heappush(self._running, (self._work + call.reading + call.output_tokens, self._taken, call))


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

    def take_version(self, version: int, *, rereads: bool, keeps: int | None = None) -> None:
        """Have every server take a version, as `SimulatedServer.take_version` says."""
        for at, server in enumerate(self._servers):
            server.advance(self._events.now)
            server.take_version(version, rereads=rereads, keeps=keeps)
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


@dataclass(frozen=True, slots=True)
class SimulatedMachine:
    """The machine of a simulated run."""

    events: EventQueue
    cores: SharedCores
    driver: SimulatedDriver
    pool: SimulatedPool
