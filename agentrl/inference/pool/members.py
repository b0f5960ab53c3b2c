"""The members of a pool: the servers that serve, the server that each episode uses, and how often a call is made again.

Invariant: only a `SERVING` server gets calls, and a server is `SERVING` only with the pool's version of the weights. A
repeatable control call is retried at the same server while that server answers, as often as a model call.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence, Set
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from enum import StrEnum
from http import HTTPStatus
from typing import Literal, Protocol, TypeVar

import anyio

from agentrl.errors import ServerError, ServerUnavailable
from agentrl.inference.backend import Context, GenerateRequest, Generation, GenerationChunk, WeightSource
from agentrl.inference.sglang.named_adapters import AdapterReceiver
from agentrl.inference.sglang.server import Receiver
from agentrl.support.concurrency import Deadline
from agentrl.types import Float32Array, Int32Array
from agentrl.weights.types import ExpectedWeights, Publication, WeightChannel

PauseMode = Literal["retract", "in_place"]
PAUSES: Mapping[Literal["exact", "fast", "pinned"], PauseMode] = {
    "exact": "retract",
    "fast": "in_place",
    "pinned": "retract",
}
"""The pause mode of servers for each value of `inference.pause_mode`; servers do not pause for an adapter."""


class Server(Protocol):
    """A server, as the pool uses it: `SGLangServer` over HTTP, `ScriptedServer` in process."""

    @property
    def url(self) -> str:
        """Its name in messages; unique in the pool."""
        ...

    @property
    def version(self) -> int:
        """The policy version it last reported or was given."""
        ...

    @property
    def paused(self) -> bool:
        """Whether this pool paused the server, or may have."""
        ...

    @property
    def checksum_kind(self) -> str:
        """`agentrl`: `checksums` compare with a `Publication`. Any other kind compares only with itself."""
        ...

    @property
    def dtype(self) -> str:
        """Type in which it holds weights, by torch's name; another word where it does not say."""
        ...

    @property
    def max_context_tokens(self) -> int | None:
        """Longest context plus output, tokens, that the server grants every call; None while unknown."""
        ...

    @property
    def groups(self) -> Receiver:
        """Its part in taking weights from the trainer's memory."""
        ...

    @property
    def adapters(self) -> AdapterReceiver:
        """Its part in taking LoRA adapters."""
        ...

    async def connect(self) -> None:
        """Ask the server for its description; also after a restart."""
        ...

    async def aclose(self) -> None:
        """Close all connections to the server."""
        ...

    async def generate(self, request: GenerateRequest) -> Generation:
        """Return the completion, without retries on other servers."""
        ...

    def stream(self, request: GenerateRequest) -> AbstractAsyncContextManager[AsyncIterator[GenerationChunk]]:
        """Yield the completion as it is sampled, without retries on other servers."""
        ...

    async def give_up(self, request_id: str) -> None:
        """Have a call return the tokens it has, with `StopReason.ABORT`; an unknown id is ignored."""
        ...

    async def end_session(self, episode_id: str) -> None:
        """End the session of an episode, whose cache the server may then evict."""
        ...

    async def check(self) -> int:
        """Return the version of the weights; answers during a pause too."""
        ...

    async def pause(self, mode: PauseMode) -> None:
        """Stop sampling; calls in flight stay open, and new ones wait."""
        ...

    async def resume(self) -> None:
        """Continue sampling."""
        ...

    async def load_weights(self, publication: Publication) -> None:
        """Load weights during a pause, and check the version that the server then reports."""
        ...

    async def checksums(self) -> Mapping[str, str]:
        """Return the digest of each tensor."""
        ...

    async def score(self, token_ids: Int32Array) -> Float32Array:
        """Return the log-probs of `token_ids[1:]`, temperature 1."""
        ...


NOTICE_S = 5.0
"""Seconds after its connections broke within which a launcher reports the end of a process."""
FROZEN_CHECKS = 2
"""Health checks in a row without any answer after which a server counts as frozen."""


_WORTH_SHARING = 256
"""Shortest context, tokens, for which an episode opens on a busier server that has it."""
_BUSIER = 16
"""Episodes or calls in flight by which that server may exceed the least busy one."""
_REMEMBERED_OPENINGS = 4096
"""Contexts of first calls whose server is remembered."""
BACK_OFF_S = 0.5
"""Seconds before an overloaded server is called again, when it does not say how long; doubled with each failure."""
MAX_BACK_OFF_S = 30.0
_OVERLOADED = frozenset({HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE})
_Answer = TypeVar("_Answer")


class State(StrEnum):
    """Whether a server gets calls."""

    SERVING = "serving"
    BEHIND = "behind"
    """Answers, and gets the current weights now."""
    STUCK = "stuck"
    """Answers, but did not take the current weights; every health check and the next update try again."""
    WAITING = "waiting"
    """Answers, and gets the weights of the next update, because the trainer no longer has the current ones."""
    WRONG = "wrong"
    """Answers, but its log-probs are not the trainer's; it stays out unless its process is restarted."""
    DEAD = "dead"
    """Does not answer; every health check asks again."""
    STARTING = "starting"
    """Its process has ended, and its launcher starts it again."""


@dataclass(slots=True, eq=False)
class Member:
    """A server of the pool."""

    server: Server
    state: State = State.DEAD
    reason: str = "not connected yet"
    """The reason for not serving; `why` adds the launcher's note."""
    note: str = ""
    """The launcher's note on this server, such as "no restart is left"."""
    sessions: int = 0
    """Episodes that use it."""
    waits: set[Deadline] = field(default_factory=set[Deadline])
    """The waits of model calls for this server; evicting it ends them, and the calls go to other servers."""
    wake: anyio.Event = field(default_factory=anyio.Event)
    """Set to check its health now."""
    control: anyio.Lock = field(default_factory=anyio.Lock)
    """Held by the task that pauses, loads and resumes it: a weight update, or its own catching up."""
    control_wait: anyio.CancelScope | None = None
    """Scope of the running control call of a weight update; cancelled when the server dies or gives no answer."""
    catch_up: anyio.CancelScope | None = None
    """The scope of its catching up; a weight update cancels it and takes over."""
    group: str = ""
    """The last process group with the trainer that it joined or was about to join."""
    kept: bool = False
    """Whether its launcher restarts its process when that ends, and reports the end within `NOTICE_S`."""
    launched: bool = False
    """Whether a launcher has reported about it; a server that others run may return without a report."""
    ended: bool = False
    """Whether its launcher reported the end of its process, and no start since."""
    silent_since: float | None = None
    """When the first of its health checks began that got no answer; None since the last answer."""
    heard_at: float = -math.inf
    """When a model call last got tokens from it; a server that answers calls is busy, where it answers no health check."""
    frozen: anyio.Event = field(default_factory=anyio.Event)
    """Set when it has been silent for `FROZEN_CHECKS` health checks."""
    taken_out: anyio.Event = field(default_factory=anyio.Event)
    """Set when it was evicted because its log-probs are wrong, and its process was not restarted since."""
    held: tuple[ExpectedWeights, Mapping[str, str]] | None = None
    """The version that it last took and proved to have, with its digests; None: none yet."""
    channel: WeightChannel | None = None
    """The trainer's end of that group, once the server has joined; None after an eviction, as it may have been restarted."""

    @property
    def url(self) -> str:
        return self.server.url

    @property
    def why(self) -> str:
        """The reason for not serving; empty where it does."""
        return f"{self.reason}; {self.note}" if self.reason and self.note else self.reason

    @property
    def in_flight(self) -> int:
        return len(self.waits)


class Members:
    """All servers, the version they serve, and the server that each running episode uses."""

    def __init__(self, servers: Sequence[Server], *, max_sessions: int = 65_536) -> None:
        self.all = [Member(server) for server in servers]
        self.version = 0
        self.target = 0
        """The highest version a server may be sampling with; above `version` only during an update."""
        self.source: WeightSource | None = None
        """The current weights; None before the first update."""
        self.digests: dict[str, tuple[str, Mapping[str, str]]] = {}
        """Digests of the current weights by `checksum_kind`, with the server that reported them; none of agentrl's kind."""
        self._sessions: OrderedDict[str, Member] = OrderedDict()
        self._max_sessions = max_sessions
        self._openings: OrderedDict[bytes, Member] = OrderedDict()
        self.ended: deque[tuple[str, Member]] = deque(maxlen=max_sessions)
        """Episodes that left a server, which is still to be told."""
        self.has_ended = anyio.Event()
        """Set when there are such; there is a new one once they are taken."""
        self._changed = anyio.Event()

    def at(self, url: str) -> Member:
        """Return the member with a base URL, which may end in a slash; raise `ServerUnavailable` if there is none."""
        for member in self.all:
            if member.url.rstrip("/") == url.rstrip("/"):
                return member
        there = ", ".join(member.url for member in self.all)
        raise ServerUnavailable(f"{url}: expected a server of the pool, which has {there}; was it started again?", url=url)

    def serving(self) -> list[Member]:
        return [member for member in self.all if member.state is State.SERVING]

    def other_serving(self, avoid: Set[Member]) -> bool:
        return any(member not in avoid for member in self.serving())

    async def route(self, episode_id: str, avoid: Set[Member], context: Context | None = None) -> Member:
        """Return the episode's server, or else the one to open it on; `avoid` only when there is no other.

        It opens where a long `context` was sent before, as by other members of its group, because that server has it in its
        cache, unless it is `_BUSIER` than another; else where the fewest calls are in flight. Waits while no server serves
        but one starts again, takes the current weights or gets those of the next update.
        """
        while not (serving := self.serving()):
            await self.wait_for_change()
        home = self._sessions.get(episode_id)
        if home is None or home.state is not State.SERVING or home in avoid:
            choices = [member for member in serving if member not in avoid] or serving
            home = self._opening(choices, context)
            self.release(episode_id)
            self._sessions[episode_id] = home
            home.sessions += 1
            # Episodes without a reported end must not fill the memory.
            if len(self._sessions) > self._max_sessions:
                self.release(next(iter(self._sessions)))
        self._sessions.move_to_end(episode_id)
        return home

    def _opening(self, choices: Sequence[Member], context: Context | None) -> Member:
        """Return the server on which an episode with this context opens."""
        least = min(choices, key=lambda member: (member.in_flight, member.sessions))
        if context is None or context.size < _WORTH_SHARING:
            return least
        digest = context.digest()
        # Popped and put back, so that the oldest context of the dictionary is the one that was used longest ago.
        holder = self._openings.pop(digest, least)
        busier = max(holder.in_flight - least.in_flight, holder.sessions - least.sessions) >= _BUSIER
        if busier or holder not in choices:
            holder = least
        self._openings[digest] = holder
        if len(self._openings) > _REMEMBERED_OPENINGS:
            self._openings.popitem(last=False)
        return holder

    def release(self, episode_id: str) -> None:
        """Forget the server of an episode, and have it told that the session ends."""
        home = self._sessions.pop(episode_id, None)
        if home is not None:
            home.sessions -= 1
            self.end_session(episode_id, home)

    def end_session(self, episode_id: str, member: Member) -> None:
        """Queue the end of an episode for its server, which may then evict the episode's cache."""
        self.ended.append((episode_id, member))
        self.has_ended.set()

    async def wait_for_change(self) -> None:
        """Wait for a change of any member's state, when no server serves but one may soon.

        The caller waits for the pool (weights, connection), the launcher (start) or the trainer (next update), each of which
        has a deadline.
        """
        coming = any(member.state in (State.BEHIND, State.STARTING, State.WAITING) for member in self.all)
        kept = any(member.kept for member in self.all)
        # A launcher reports a restart a moment after the connections broke; until then a server that it keeps looks
        # dead.
        with anyio.move_on_after(math.inf if coming else NOTICE_S if kept else 0):
            await self._changed.wait()
            return
        raise ServerUnavailable(f"no inference server is left: {self.reasons()}")

    async def any_starting(self) -> bool:
        """Return whether a launcher starts a server again; its report may come `NOTICE_S` after the connections broke."""
        with anyio.move_on_after(NOTICE_S if any(member.kept for member in self.all) else 0):
            while all(member.state is not State.STARTING for member in self.all):
                await self._changed.wait()
        return any(member.state is State.STARTING for member in self.all)

    def may_return(self) -> bool:
        """Return whether a dead server is one that others run, which a health check may find alive."""
        return any(member.state is State.DEAD and not member.launched for member in self.all)

    async def any_returned(self, until: float) -> bool:
        """Wait until a server that others run answers again, at most until a moment; return whether one does."""
        with anyio.CancelScope(deadline=until):
            while self.may_return() and all(map(self.unreachable, self.all)):
                await self._changed.wait()
        return not all(map(self.unreachable, self.all))

    def admit(self, member: Member) -> None:
        """Let a server serve; it must have the pool's version."""
        member.state, member.reason = State.SERVING, ""
        self._notify()

    def unreachable(self, member: Member) -> bool:
        """Return whether a server is dead, starting or taken out, so that updates continue without it."""
        return member.state in (State.DEAD, State.STARTING, State.WRONG)

    def evict(self, member: Member, state: State, reason: str) -> None:
        """Stop using a server; its calls in flight go to other servers.

        A server that starts again does not become dead, and one that was taken out becomes nothing but `STARTING`.
        """
        # The launcher knows more than a failed connection: this server is on its way back.
        if state is State.DEAD and member.state is State.STARTING and member.ended:
            return
        # A server with wrong log-probs answers health checks well; only a new process makes it trustworthy again.
        if member.state is State.WRONG and state is not State.STARTING:
            return
        changed = member.state is not state
        member.state, member.reason, member.channel = state, reason, None
        for wait in member.waits:
            wait.call_off()
        # Otherwise the update of all servers would wait for this one until its deadline.
        if self.unreachable(member) and member.control_wait is not None:
            member.control_wait.cancel()
        if changed:
            self._notify()

    def reasons(self) -> str:
        """Return each server that does not serve, and the reason."""
        return "; ".join(f"{m.url} is {m.state}: {m.why}" for m in self.all if m.state is not State.SERVING)

    def _notify(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()


class Tries:
    """The failed tries of one call."""

    def __init__(self, retries: int, what: str) -> None:
        self.failures: list[str] = []
        self._retries, self._what = retries, what

    def count(self, error: ServerUnavailable) -> None:
        """Record a failure; raise it, with those before, if no try is left."""
        self.failures.append(str(error))
        if not self._retries:
            raise error
        if len(self.failures) > self._retries:
            tried = "; ".join(self.failures)
            message = f"{self._what} failed {len(self.failures)} times: {tried}"
            raise ServerUnavailable(message, status=error.status, url=error.url) from error

    async def back_off(self, error: ServerUnavailable) -> None:
        """Wait before an overloaded server is called again, at most `MAX_BACK_OFF_S`."""
        if error.status in _OVERLOADED:
            retry_after_s = error.retry_after_s
            seconds = BACK_OFF_S * 2.0 ** (len(self.failures) - 1) if retry_after_s is None else retry_after_s
            await anyio.sleep(min(seconds, MAX_BACK_OFF_S))


async def ask_member(member: Member, call: Callable[[], Awaitable[_Answer]], *, retries: int) -> _Answer:
    """Return the answer of a repeatable control call to one server.

    A closed connection, such as one that was idle for too long, and an overloaded server lead to another try.
    """
    tries = Tries(retries, "control call")
    while True:
        try:
            return await call()
        except ServerUnavailable as error:
            if error.status is not None and error.status not in _OVERLOADED:
                raise
            tries.count(error)
            try:
                # A connection that broke does not say whether the server died: only one that still answers is asked
                # again.
                await member.server.check()
            except ServerError:
                raise error from None
            await tries.back_off(error)
