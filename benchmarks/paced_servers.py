"""Inference servers that take the time of a decode curve, and no processor: they wait.

Run by benchmarks/overlap.py as a process of its own. A server samples letters, ended by the end of the turn, with the
log-prob of the uniform distribution, which is what a model with a head of zeros gives. How long an answer is follows from
its episode and turn. Requests that run together share the speed of the curve (`agentrl_simulate.servers.SimulatedServer`, in
real time); pauses, updates and retractions take effect between two tokens, as on a real server.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import anyio
import anyio.lowlevel
import msgspec

from agentrl.servers.engine import (
    ControlReply,
    EngineInfo,
    EngineLoad,
    EnginePauseMode,
    EngineRequest,
    Finish,
    NoAdapters,
    RequestProgress,
    Sink,
)
from agentrl.servers.scripted.engine import ScriptedEngine, ScriptedGroups
from agentrl.servers.serve import serving
from agentrl.weights.tensors import read_safetensors
from agentrl_simulate.costs import ServerCost
from agentrl_simulate.servers import SimulatedCall, SimulatedServer
from agentrl_simulate.workload import LognormalSource

LETTERS = 16
"""Different tokens that are sampled."""


class PacedSettings(msgspec.Struct, frozen=True):
    """Settings of the process, which it reads as JSON."""

    servers: int
    tokens_per_s: float
    half_saturation: float
    requests: int | None
    context_weight: float
    mean_tokens: float
    spread: float
    max_tokens: int
    turns: int
    vocab_size: int
    first_letter: int
    end_of_turn: int

    @property
    def cost(self) -> ServerCost:
        """Return the decode curve."""
        return ServerCost(
            tokens_per_s=self.tokens_per_s,
            half_saturation=self.half_saturation,
            requests=self.requests,
            context_weight=self.context_weight,
        )

    def source(self, outside_s: float = 0.0, context_tokens: int = 0) -> LognormalSource:
        """Return the episodes."""
        return LognormalSource(
            mean_tokens=self.mean_tokens,
            spread=self.spread,
            max_tokens=self.max_tokens,
            context_tokens=context_tokens,
            turns=self.turns,
            outside_s=outside_s,
        )


@dataclass(slots=True, eq=False)
class _Flight:
    request: EngineRequest
    sink: Sink
    call: SimulatedCall
    tokens: int


@dataclass(slots=True)
class _Session:
    turns: int = 0
    size: int = 0
    """Tokens that the server has read or sampled for it."""
    version: int = 0
    lengths: list[int] = field(default_factory=list[int])


class PacedEngine:
    """Implements `InferenceEngine` in the time of a `SimulatedServer`."""

    def __init__(self, settings: PacedSettings) -> None:
        self._settings, self._source = settings, settings.source()
        self._server = SimulatedServer(settings.cost)
        self._flights: dict[str, _Flight] = {}
        self._sessions: dict[str, _Session] = {}
        self._changed = anyio.Event()
        self._mode: EnginePauseMode | None = None
        self._label, self._path = "default", ""
        self.groups, self.adapters = ScriptedGroups(ScriptedEngine(lambda _: [0], vocab_size=2)), NoAdapters()
        self.first_s = self.last_s = 0.0

    @property
    def info(self) -> EngineInfo:
        """Return the model's name and limits."""
        return EngineInfo(
            model_path=self._path,
            weight_version=self._label,
            vocab_size=self._settings.vocab_size,
            max_context_tokens=1 << 20,
            max_running_requests=self._settings.requests or 1 << 16,
            max_total_tokens=1 << 30,
            has_sessions=True,
        )

    @property
    def load(self) -> EngineLoad:
        """Return how busy it is."""
        return EngineLoad(num_running=len(self._flights), paused=self._mode)

    @property
    def busy_share(self) -> float:
        """Return the share of the time between the first and the last request in which any ran."""
        return self._server.busy_s / max(self.last_s - self.first_s, 1e-9)

    async def run(self) -> None:
        """End each request at the time that the curve gives."""
        while True:
            self._advance()
            while (end := self._server.next_end()) is not None and end <= time.monotonic():
                self._finish(self._server.end_first())
            end = self._server.next_end()
            self._changed = anyio.Event()
            with anyio.move_on_after(math.inf if end is None else max(0.0, end - time.monotonic())):
                await self._changed.wait()

    def submit(self, request: EngineRequest, sink: Sink) -> None:
        """Take up a request; one that samples nothing is answered at once."""
        if not request.sampling.max_new_tokens:
            progress = RequestProgress(request=request, finish=Finish(kind="length"))
            progress.input_logprobs = [None, *self._uniform(len(request.input_ids) - 1 - request.logprob_start_len)]
            sink.finish(progress)
            return
        session = self._sessions.setdefault(request.session, _Session())
        if not session.lengths:
            session.lengths = self._lengths(request.session)
        tokens = min(request.sampling.max_new_tokens, session.lengths[min(session.turns, len(session.lengths) - 1)])
        call = SimulatedCall(
            context_tokens=max(0, len(request.input_ids) - session.size),
            output_tokens=tokens,
            history_tokens=session.size,
            history_version=session.version,
            on_end=lambda: None,
        )
        session.turns, session.size = session.turns + 1, len(request.input_ids) + tokens
        session.version = self._server.version
        self._advance()
        self.first_s = self.first_s or time.monotonic()
        self._flights[request.rid] = _Flight(request, sink, call, tokens)
        self._server.add(call)
        self._changed.set()

    def abort(self, rid: str = "", *, abort_all: bool = False, exact: bool = False) -> int:
        """End requests without output."""
        found = [one for one in self._flights if abort_all or (one == rid if exact else rid and one.startswith(rid))]
        self._advance()
        for one in found:
            flight = self._flights.pop(one)
            self._server.remove(flight.call)
            flight.sink.finish(RequestProgress(request=flight.request, finish=Finish(kind="abort", message="Aborted")))
        self._changed.set()
        return len(found)

    async def pause(self, mode: EnginePauseMode) -> None:
        """Stop sampling."""
        await anyio.lowlevel.checkpoint()
        self._advance()
        self._server.set_speed(0.0)
        self._mode = mode

    async def resume(self) -> None:
        """Continue."""
        await anyio.lowlevel.checkpoint()
        self._advance()
        self._server.set_speed(1.0)
        self._mode = None
        self._changed.set()

    async def update_weights(
        self, model_path: str, *, weight_version: str | None, flush_cache: bool, abort_all_requests: bool
    ) -> ControlReply:
        """Take the name of new weights; all have a head of zeros."""
        await anyio.lowlevel.checkpoint()
        self._path = model_path
        if weight_version is not None:
            await self.set_weight_version(weight_version, abort_all_requests=abort_all_requests)
        return ControlReply(success=True, message="Succeeded to update model weights.")

    async def set_weight_version(self, weight_version: str, *, abort_all_requests: bool) -> None:
        """Give tokens from now on another version."""
        await anyio.lowlevel.checkpoint()
        self._advance()
        self._server.take_version(int(weight_version), rereads=self._mode == "retract")
        self._label = weight_version

    async def settled(self) -> None:
        """Return at once."""
        await anyio.lowlevel.checkpoint()

    async def flush_cache(self, timeout_s: float) -> bool:
        """Do nothing."""
        await anyio.lowlevel.checkpoint()
        return True

    def close_session(self, session: str) -> None:
        """Forget a session."""
        self._sessions.pop(session, None)

    def checksums(self) -> Mapping[str, str]:
        """Return the digests of the published tensors."""
        tensors = read_safetensors(Path(self._path) / "model.safetensors") if self._path else {}
        return {name: tensor.checksum(name) for name, tensor in tensors.items()}

    def encode(self, text: str) -> list[int]:
        """Return no ids; calls come as ids."""
        return []

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Return no text; the client decodes."""
        return ""

    def _advance(self) -> None:
        self._server.advance(time.monotonic())

    def _lengths(self, session: str) -> list[int]:
        """Return the output tokens of each turn of an episode, named GROUP.MEMBER.ATTEMPT after the client's prefix."""
        group, _, member = session.rpartition("-")[2].partition(".")
        if not group.isdigit():
            return [8]  # the engine's own check of the servers
        member = member.partition(".")[0]
        return [turn.output_tokens for turn in self._source.attempts(int(group), int(member))[0].turns]

    def _uniform(self, count: int) -> list[float]:
        return [-math.log(self._settings.vocab_size)] * max(0, count)

    def _finish(self, call: SimulatedCall) -> None:
        flight = next(one for one in self._flights.values() if one.call is call)
        del self._flights[flight.request.rid]
        self.last_s = time.monotonic()
        progress = RequestProgress(request=flight.request)
        letters = [self._settings.first_letter + at % LETTERS for at in range(flight.tokens - 1)]
        progress.output_ids = [*letters, self._settings.end_of_turn]
        progress.output_logprobs = self._uniform(flight.tokens)
        at = 0
        for version, count in sorted((version, count) for version, count in call.tokens.items() if count):
            progress.versions.append((str(version), at))
            at += count
        progress.finish = Finish(kind="stop", matched=self._settings.end_of_turn)
        flight.sink.finish(progress)


async def _main(settings: PacedSettings) -> None:
    engines = [PacedEngine(settings) for _ in range(settings.servers)]
    async with anyio.create_task_group() as tasks:

        async def serve(engine: PacedEngine, *, task_status: anyio.abc.TaskStatus[str]) -> None:
            async with serving(engine) as url:
                task_status.started(url)
                await anyio.sleep_forever()

        urls = [await tasks.start(serve, engine) for engine in engines]
        print(json.dumps(urls), flush=True)
        await anyio.to_thread.run_sync(sys.stdin.read, abandon_on_cancel=True)
        tasks.cancel_scope.cancel()
    print(json.dumps([engine.busy_share for engine in engines]), flush=True)


if __name__ == "__main__":
    anyio.run(_main, msgspec.json.decode(sys.argv[1], type=PacedSettings))
