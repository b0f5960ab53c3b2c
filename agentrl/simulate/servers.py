"""An inference server in virtual time: requests that run together share its speed, others wait in a queue.

Invariant: a request gets exactly its work, in the order in which the server took it up; the sum of tokens over all versions
of a request is its output. One number, the work of a request present from the beginning, tells when each request ends.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from agentrl.simulate.costs.model import ServerCost


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
        call.tokens[self.version] += call.output_tokens - sum(call.tokens.values())
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

    def take_version(self, version: int, *, rereads: bool) -> None:
        """Sample with new weights from now on; `rereads`: what was read under the former ones must be read again."""
        if rereads:
            self._read_since = version
        again: list[tuple[float, int, SimulatedCall]] = []
        for ends_at, number, call in self._running:
            done = max(0.0, self._work - call.begun_at - call.reading)
            sampled = min(float(call.output_tokens), done)
            new = int(sampled) - sum(call.tokens.values())
            if new > 0:
                call.tokens[self.version] += new
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
            call.begun_at = self._work
            again = call.history_tokens if call.history_version < self._read_since else 0
            call.reading = self._cost.context_weight * (call.context_tokens + again)
            self._taken += 1
            heapq.heappush(self._running, (self._work + call.reading + call.output_tokens, self._taken, call))
