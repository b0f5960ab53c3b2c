"""The episodes in flight, and the model calls that they finished last.

Invariant: an episode is listed from its start to its end; its entry counts each running model call. A group is unverified
at a server from the end of a call there until a spot check of that server passes.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Protocol, runtime_checkable

import numpy as np

from agentrl.errors import InvariantError
from agentrl.inference.backend import Backend, GenerateRequest, Generation, GenerationChunk, GivesUp
from agentrl.types import Int32Array, Turn

logger = logging.getLogger(__name__)

_REMEMBERED_SEEDS = 4096


@dataclass(slots=True)
class Flight:
    """One running episode."""

    group: int | None
    """None for an evaluation."""
    task_id: str
    since: float
    """Time of its last change of state."""
    turns: int = 0
    calls: int = 0
    """Model calls running now."""


class InFlight:
    """The running episodes of a run."""

    def __init__(self, *, on_progress: Callable[[], None], now: Callable[[], float] = time.monotonic) -> None:
        self._flights: dict[str, Flight] = {}
        self._on_progress = on_progress
        self._now = now
        self.tokens_by_group: Counter[int] = Counter()
        """Tokens sampled for each group that is neither trained nor dropped."""
        self.num_turns = 0
        self.num_tokens = 0
        """Sampled in all, evaluations included."""
        self.num_evaluation_tokens = 0

    def __len__(self) -> int:
        return len(self._flights)

    @contextmanager
    def episode(self, episode_id: str, task_id: str, group: int | None) -> Generator[Callable[[Turn], None], None, None]:
        """List an episode while the block runs; yield the callback for its turns."""
        flight = self._flights[episode_id] = Flight(group, task_id, self._now())
        self._on_progress()

        def on_turn(turn: Turn) -> None:
            flight.turns += 1
            self.num_turns += 1
            self.num_tokens += len(turn.output_ids)
            if group is None:
                self.num_evaluation_tokens += len(turn.output_ids)
            else:
                self.tokens_by_group[group] += len(turn.output_ids)
            self._on_progress()

        try:
            yield on_turn
        finally:
            del self._flights[episode_id]
            self._on_progress()

    @contextmanager
    def model_call(self, episode_id: str) -> Generator[int | None, None, None]:
        """Count a model call of an episode while the block runs; yield the episode's group."""
        flight = self._flights.get(episode_id)
        if flight is None:  # a call that outlives its episode: nothing waits for it
            yield None
            return
        flight.calls += 1
        flight.since = self._now()
        try:
            yield flight.group
        finally:
            flight.calls -= 1
            flight.since = self._now()

    def describe(self, groups: tuple[int, ...] = (), *, limit: int = 12) -> list[str]:
        """Return a line for each of at most `limit` episodes, those of `groups` first, then those longest in their state."""
        now = self._now()
        ordered = sorted(self._flights.items(), key=lambda item: (item[1].group not in groups, item[1].since))
        lines: list[str] = []
        for episode_id, flight in ordered[:limit]:
            whom = "an inference server" if flight.calls else "the workflow's own code"
            of = "an evaluation" if flight.group is None else f"group {flight.group}"
            lines.append(
                f"episode {episode_id} of {of} (task {flight.task_id}) is in turn {flight.turns}, "
                f"waiting for {whom} since {now - flight.since:.1f} s"
            )
        if len(ordered) > limit:
            lines.append(f"... and {len(ordered) - limit} more episodes")
        return lines


@dataclass(frozen=True, slots=True)
class FinishedCall:
    """A model call and what the server returned."""

    token_ids: Int32Array
    """[L] int32: the context and the output."""
    context_size: int
    """Number of ids of the context."""
    temperature: float
    generation: Generation

    def tokens_of(self, version: int) -> int:
        """Return the number of output ids, the first ones, that `version` sampled; 0 if the call began with another version.

        Later ids of an interrupted call do not count: under `inference.pause_mode: fast` their log-probs are inexact.
        """
        first = self.generation.spans[0] if self.generation.spans else None
        return first.end if first is not None and first.version == version else 0


class FinishedCalls:
    """The last calls of each server, and the groups with calls that no spot check has covered."""

    KEPT = 4
    """Calls kept for each server."""
    IMPOSSIBLE_LOGPROB = -100.0
    """Nats. Sampling never draws a token of this probability."""

    def __init__(self) -> None:
        self._last: dict[str, deque[FinishedCall]] = {}
        self._unverified: defaultdict[str, set[int]] = defaultdict(set)
        self.example: GenerateRequest | None = None
        """The last request whose log-probs can be compared."""
        self.impossible: str | None = None
        """The first log-prob that no server can have sampled with; None: there was none."""

    @property
    def servers(self) -> tuple[str, ...]:
        """The servers that have finished a comparable call."""
        return tuple(self._last)

    def of_version(self, server: str, version: int) -> list[FinishedCall]:
        """Return the last comparable calls of a server that began with `version`, the newest first."""
        return [call for call in reversed(self._last.get(server, ())) if call.tokens_of(version)]

    def add(self, request: GenerateRequest, generation: Generation, group: int | None) -> None:
        """Record a finished call; a greedy one cannot be compared.

        Raises:
            InvariantError: a log-prob is below `IMPOSSIBLE_LOGPROB`.
        """
        sampling, server = request.sampling, generation.server
        if group is not None:
            self._unverified[server].add(group)
        if sampling.temperature == 0:
            return
        lowest = float(generation.output_logprobs.min(initial=0.0))
        if lowest < self.IMPOSSIBLE_LOGPROB:
            self.impossible = (
                f"{server or 'the server'}: reported a log-prob of {lowest:.3g} nats for a token that it sampled in episode "
                f"{request.episode_id}, but sampling draws no token below {self.IMPOSSIBLE_LOGPROB:g}: its log-probs are "
                "wrong"
            )
            raise InvariantError(self.impossible)
        self.example = request
        token_ids = np.concatenate([request.input_ids, generation.output_ids])
        call = FinishedCall(token_ids, request.context.size, sampling.temperature, generation)
        self._last.setdefault(server, deque(maxlen=self.KEPT)).append(call)

    def passed(self, server: str) -> None:
        """Record that a spot check found the server's calls so far right."""
        self._unverified.pop(server, None)

    def forget(self, server: str) -> set[int]:
        """Drop the calls of a server that failed its spot check, and return the groups with unverified ones."""
        self._last.pop(server, None)
        return self._unverified.pop(server, set())


@runtime_checkable
class SessionBackend(Protocol):
    """A backend that keeps state for each episode until `release`."""

    def release(self, episode_id: str) -> None:
        """Drop the state of an episode that has ended."""
        ...


@runtime_checkable
class DescribedBackend(Protocol):
    """A backend that can describe its servers."""

    def describe(self) -> object:
        """Return the present state of each server; its `str` is for people."""
        ...


def release_episode(backend: Backend, episode_id: str) -> None:
    """Let a backend that keeps state for each episode drop that of one that has ended."""
    if isinstance(backend, SessionBackend):
        backend.release(episode_id)


class SeedWatch:
    """Warns once of a workflow that gives the calls of several members of a group one seed, so that they sample alike."""

    def __init__(self) -> None:
        self._episodes: OrderedDict[tuple[str, int], str] = OrderedDict()
        self._warned = False

    def check(self, episode_id: str, seed: int | None) -> None:
        """Look at the seed of a call."""
        group, _, _ = episode_id.partition(".")
        if seed is None or self._warned:
            return
        other = self._episodes.setdefault((group, seed), episode_id)
        if other.rpartition(".")[0] != episode_id.rpartition(".")[0]:
            self._warned = True
            logger.warning(
                "episodes %s and %s of one group sample with the same seed %d, so equal prompts get equal answers and the "
                "group carries no signal; leave `seed` out of the model calls, and each call gets one of its own",
                other,
                episode_id,
                seed,
            )
        while len(self._episodes) > _REMEMBERED_SEEDS:
            self._episodes.popitem(last=False)


class WatchedChunks(AsyncIterator[GenerationChunk]):
    """The chunks of one call, whose last one is recorded."""

    def __init__(self, chunks: AsyncIterator[GenerationChunk], record: Callable[[Generation], None]) -> None:
        self._chunks, self._record = chunks, record

    async def __anext__(self) -> GenerationChunk:
        chunk = await anext(self._chunks)
        if chunk.generation is not None:
            self._record(chunk.generation)
        return chunk


class WatchedBackend:
    """A backend that counts its calls in an `InFlight` and records their ends."""

    def __init__(self, backend: Backend, flights: InFlight) -> None:
        self._backend = backend
        self._flights = flights
        self._seeds = SeedWatch()
        self.finished = FinishedCalls()

    async def generate(self, request: GenerateRequest) -> Generation:
        """Return the backend's completion."""
        self._seeds.check(request.episode_id, request.sampling.seed)
        with self._flights.model_call(request.episode_id) as group:
            generation = await self._backend.generate(request)
        self.finished.add(request, generation, group)
        return generation

    async def give_up(self, request_id: str) -> None:
        """Have a call end early, where the backend can do that."""
        if isinstance(self._backend, GivesUp):
            await self._backend.give_up(request_id)

    def release(self, episode_id: str) -> None:
        release_episode(self._backend, episode_id)

    def describe(self) -> list[str]:
        """Return a line about the servers, where the backend has one."""
        return [f"servers: {self._backend.describe()}"] if isinstance(self._backend, DescribedBackend) else []

    def stream(self, request: GenerateRequest) -> AbstractAsyncContextManager[AsyncIterator[GenerationChunk]]:
        """Yield the backend's chunks."""
        return self._stream(request)

    @asynccontextmanager
    async def _stream(self, request: GenerateRequest) -> AsyncGenerator[AsyncIterator[GenerationChunk]]:
        self._seeds.check(request.episode_id, request.sampling.seed)
        with self._flights.model_call(request.episode_id) as group:
            async with self._backend.stream(request) as chunks:
                yield WatchedChunks(chunks, partial(self.finished.add, request, group=group))
