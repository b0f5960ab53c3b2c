"""Which servers there are, which of them serve, and which episode goes where.

Invariant: a server is routed to only while it is `SERVING`, and it is that only with the roster's version of the weights.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import AsyncIterator, Mapping, Sequence, Set
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal, Protocol

import anyio

from agentrl.concurrency import Deadline
from agentrl.errors import ServerUnavailable
from agentrl.inference.backend import GenerateRequest, Generation, GenerationChunk, WeightSource
from agentrl.inference.sglang.groups import Receiver
from agentrl.types import Float32Array, Int32Array
from agentrl.weights.types import Publication, WeightChannel

PauseMode = Literal["retract", "in_place"]
PAUSES: Mapping[Literal["exact", "fast"], PauseMode] = {"exact": "retract", "fast": "in_place"}
"""What servers are told, by what `inference.pause_mode` says."""


class Server(Protocol):
    """What the pool asks of one server: `SGLangServer` over HTTP, `ScriptedServer` in process."""

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
        """Whether it was paused from here, or may have been."""
        ...

    @property
    def checksum_kind(self) -> str:
        """`agentrl`: `checksums` are those of a `Publication`. Anything else: comparable with the same kind only."""
        ...

    @property
    def max_context_tokens(self) -> int | None:
        """Longest context plus output that a call is sure to get; None while unknown."""
        ...

    @property
    def groups(self) -> Receiver:
        """Its part in taking weights from the trainer's memory."""
        ...

    async def connect(self) -> None:
        """Ask the server what it is; also after a restart."""
        ...

    async def aclose(self) -> None:
        """Let go of the server."""
        ...

    async def generate(self, request: GenerateRequest) -> Generation:
        """See `Backend.generate`; without retries on other servers."""
        ...

    def stream(self, request: GenerateRequest) -> AbstractAsyncContextManager[AsyncIterator[GenerationChunk]]:
        """See `Backend.stream`; without retries on other servers."""
        ...

    async def check(self) -> int:
        """Return the version of the weights; a sign of life, also while paused."""
        ...

    async def pause(self, mode: PauseMode) -> None:
        """Stop sampling; calls in flight stay open, new ones are held."""
        ...

    async def resume(self) -> None:
        """Continue sampling."""
        ...

    async def load_weights(self, publication: Publication) -> None:
        """Load weights while paused, and check the version the server then reports."""
        ...

    async def checksums(self) -> Mapping[str, str] | None:
        """Return the digest of each tensor; None when the server cannot tell."""
        ...

    async def score(self, token_ids: Int32Array) -> Float32Array:
        """Return the log-probs of `token_ids[1:]`, temperature 1."""
        ...


NOTICE_S = 2.0
"""Seconds within which the end of a process is known to whoever started it, after its connections broke."""


class State(StrEnum):
    """Whether a server is used."""

    SERVING = "serving"
    BEHIND = "behind"
    """Answers, and is to be given the current weights now."""
    STUCK = "stuck"
    """Answers, but could not be given the current weights; tried again at every health interval, and by the next update."""
    DEAD = "dead"
    """Does not answer; asked again at every health interval."""
    STARTING = "starting"
    """Its process has ended and is being started again."""


@dataclass(slots=True, eq=False)
class Member:
    """A server of the pool."""

    server: Server
    state: State = State.DEAD
    reason: str = "not connected yet"
    """Why it does not serve."""
    sessions: int = 0
    """Episodes at home here."""
    waits: set[Deadline] = field(default_factory=set[Deadline])
    """Of model calls, for this server; called off when it is evicted, so that the calls go elsewhere."""
    wake: anyio.Event = field(default_factory=anyio.Event)
    """Set to have it probed now."""
    control: anyio.Lock = field(default_factory=anyio.Lock)
    """Held by whoever pauses, loads and resumes: a weight update, or its own way back into the pool."""
    catch_up: anyio.CancelScope | None = None
    """Of its way back; a weight update cancels it and takes over."""
    group: str = ""
    """Its process group with the trainer, the last it was in."""
    kept: bool = False
    """Whether its process is started again when it ends; whoever does that says so within `NOTICE_S` of the end."""
    ended: bool = False
    """Whether its process is known to have ended and not known to have been started again."""
    channel: WeightChannel | None = None
    """The trainer's end of that group; None once the server was out of the pool, as it may have been restarted."""

    @property
    def url(self) -> str:
        """Of the server."""
        return self.server.url

    @property
    def in_flight(self) -> int:
        """Model calls."""
        return len(self.waits)


class Roster:
    """The members, the version they serve, and the server each running episode is at home on."""

    def __init__(self, servers: Sequence[Server], *, max_sessions: int = 65_536) -> None:
        """Begin with no server serving.

        Args:
            servers: the members.
            max_sessions: episodes remembered; the one unused for longest is forgotten first.
        """
        self.members = [Member(server) for server in servers]
        self.version = 0
        self.target = 0
        """The highest version a server may be sampling with; above `version` only during an update."""
        self.source: WeightSource | None = None
        """The current weights; None before the first update."""
        self.digests: dict[str, tuple[str, Mapping[str, str]]] = {}
        """Of the current weights: what kinds of server other than agentrl's report, and which server of the kind did."""
        self._sessions: OrderedDict[str, Member] = OrderedDict()
        self._max_sessions = max_sessions
        self._changed = anyio.Event()

    def serving(self) -> list[Member]:
        """Return the members that serve."""
        return [member for member in self.members if member.state is State.SERVING]

    async def route(self, episode_id: str, avoid: Set[Member]) -> Member:
        """Return the episode's server, or the one with the fewest calls in flight.

        Waits while no server serves but one is being started again or given the current weights.

        Args:
            episode_id: the episode.
            avoid: servers that failed this call; taken only when there is no other.

        Raises:
            ServerUnavailable: when no server serves, naming each and why.

        Cancellation: nothing is left behind.
        """
        while not (serving := self.serving()):
            await self.hope()
        home = self._sessions.get(episode_id)
        if home is None or home.state is not State.SERVING or home in avoid:
            choices = [member for member in serving if member not in avoid] or serving
            home = min(choices, key=lambda member: (member.in_flight, member.sessions))
            self.release(episode_id)
            self._sessions[episode_id] = home
            home.sessions += 1
            if len(self._sessions) > self._max_sessions:
                self.release(next(iter(self._sessions)))
        self._sessions.move_to_end(episode_id)
        return home

    def release(self, episode_id: str) -> None:
        """Forget an episode that has ended."""
        home = self._sessions.pop(episode_id, None)
        if home is not None:
            home.sessions -= 1

    async def hope(self) -> None:
        """Wait for a change, when no server serves but one may soon.

        The wait is for the pool to give a server weights or to ask one that was started what it is, or for whoever launched
        it to start it; each has a deadline.

        Raises:
            ServerUnavailable: none will, naming each and why.

        Cancellation: nothing is left behind.
        """
        coming = any(member.state in (State.BEHIND, State.STARTING) for member in self.members)
        kept = any(member.kept for member in self.members)
        with anyio.move_on_after(math.inf if coming else NOTICE_S if kept else 0):
            await self._changed.wait()
            return
        raise ServerUnavailable(f"no inference server is left: {self.reasons()}")

    async def starting(self) -> bool:
        """Return whether a server is being started again; the word of it may come a moment after its connections broke.

        Cancellation: nothing is left behind.
        """
        with anyio.move_on_after(NOTICE_S if any(member.kept for member in self.members) else 0):
            while all(member.state is not State.STARTING for member in self.members):
                await self._changed.wait()
        return any(member.state is State.STARTING for member in self.members)

    def admit(self, member: Member) -> None:
        """Let a server serve; it must have the roster's version."""
        member.state, member.reason = State.SERVING, ""
        self._notify()

    def away(self, member: Member) -> bool:
        """Return whether a server does not answer, as far as is known."""
        return member.state in (State.DEAD, State.STARTING)

    def evict(self, member: Member, state: State, reason: str) -> None:
        """Take a server out; its calls in flight go elsewhere. One that is being started again is not dead, for now."""
        if state is State.DEAD and member.state is State.STARTING and member.ended:
            return
        changed = member.state is not state
        member.state, member.reason, member.channel = state, reason, None
        for wait in member.waits:
            wait.call_off()
        if changed:
            self._notify()

    def reasons(self) -> str:
        """Return each server that does not serve, and why."""
        return "; ".join(f"{m.url} is {m.state}: {m.reason}" for m in self.members if m.state is not State.SERVING)

    def _notify(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()
