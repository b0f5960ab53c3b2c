"""A server that answers from a script, for agentrl's tests and for tests of workflows. No model, no torch, no sockets.

Invariant: the server, a client of a `ScriptedEngine` in the same process, keeps every promise of `Backend` and `Inference`
that a real server keeps, and a `Fault` breaks exactly the one it names. Its replies pass the same checks as those of a real
server. A control call does its whole work or none of it. Runs under asyncio and trio.

Example:
    >>> import anyio
    >>> from agentrl.inference.backend import Context
    >>> from agentrl.inference.backend import GenerateRequest, SamplingParams
    >>> def encode(text: str) -> list[int]:
    ...     return list(text.encode())
    >>> server = ScriptedServer.from_texts(encode, ["<tool_call>...", "The answer is 4"], vocab_size=300, eos_id=299)
    >>> request = GenerateRequest(request_id="0" * 32, episode_id="e", context=Context.of([1, 2, 3]),
    ...                           sampling=SamplingParams(max_new_tokens=64))
    >>> generation = anyio.run(server.generate, request)
    >>> bytes(generation.output_ids[:-1].tolist()).decode(), generation.matched_stop
    ('<tool_call>...', 299)
    >>> server.calls[0].turn, len(server.calls)
    (0, 1)

A script is a function of the call:

    def script(call: ScriptedCall) -> ScriptedReply:
        if call.index == 0:
            return ScriptedReply(fault=Fault.REFUSE)
        return ScriptedReply(output="The answer is 4")
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import fields
from functools import partial
from typing import Literal, Unpack

import anyio
import anyio.lowlevel
import numpy as np
import orjson

from agentrl.errors import ReplyError, RequestRejected, ServerUnavailable, WeightSyncError
from agentrl.inference.backend import (
    GenerateRequest,
    Generation,
    GenerationChunk,
    Probe,
    SamplingParams,
    UpdateReport,
    WeightSource,
)
from agentrl.inference.pool.members import Member, Members
from agentrl.inference.pool.update import WeightSwap
from agentrl.inference.sglang.calls import Assembly
from agentrl.inference.sglang.named_adapters import NoReceiver
from agentrl.inference.sglang.wire import check_request, parse_reply
from agentrl.servers.engine import EngineRequest, EngineSampling
from agentrl.servers.scripted.engine import ControlCall, ScriptedEngine
from agentrl.servers.scripted.playback import Playback
from agentrl.servers.scripted.script import (
    Fault,
    Hold,
    Script,
    ScriptedCall,
    ScriptedReply,
    ScriptSettings,
    TextEncoder,
)
from agentrl.support.concurrency import Deadline
from agentrl.types import Float32Array, Int32Array
from agentrl.weights.types import GroupAddress, GroupRequest, Manifest, Publication, scripted_checksums, scripted_logprobs

__all__ = ["ControlCall", "Fault", "Hold", "Script", "ScriptedCall", "ScriptedReply", "ScriptedServer", "scripted_logprobs"]
_SAMPLING = tuple(field.name for field in fields(SamplingParams))


class ScriptedServer:
    """Implements `Inference`, and the pool's `Server`, in process.

    It records `calls`, `updates` and `aborted`. `ScriptedReply.fault` makes a model call fail, `control_faults` makes a
    control call fail, and `die` and `revive` stop and restart the whole server.
    """

    def __init__(
        self,
        script: Script,
        *,
        vocab_size: int,
        url: str = "scripted://0",
        timeout_s: float = 60.0,
        **settings: Unpack[ScriptSettings],
    ) -> None:
        """Start alive, not paused and with no call answered.

        Args:
            script: answers each call with a `ScriptedReply`, text or ids.
            vocab_size: ids sent and received are below it.
            url: the server's name in messages.
            timeout_s: deadline of each model and control call, seconds; a call with `Fault.HANG` ends at it.
            settings: the text of ids, the end token and the initial version.
        """
        self.engine = ScriptedEngine(script, vocab_size=vocab_size, **settings)
        """The server behind this client; `serve_scripted` puts the same one behind a socket."""
        self._url = url
        self._vocab_size = vocab_size
        self._timeout_s = timeout_s
        self._dead: str | None = None
        self._died = anyio.Event()
        self._paused = False
        self.max_context_tokens: int | None = None
        """The context limit that it reports; scripts accept any context."""
        self.ended_sessions: list[str] = []
        """Episodes whose end it was told."""
        self.aborted = self.engine.aborted
        """Request ids of calls that were cancelled or given up."""
        self.running: dict[str, Playback] = {}
        """The replies that are played to the client of this object, by request id."""
        self.updates: list[Publication] = []
        """The weights received from files, in order."""
        self.groups = ScriptedReceiver(self)
        """The part that receives weights from a trainer's memory; no tensors are sent."""
        self.adapters = NoReceiver()
        """Refuses LoRA adapters."""
        self.control_faults = self.engine.control_faults
        """Faults of control calls; may be changed at any time."""
        self.control_holds: dict[ControlCall, Hold] = {}
        """Control calls that wait, before doing anything, until their hold is released."""

    @classmethod
    def from_texts(
        cls, encode: TextEncoder, texts: Sequence[str], *, vocab_size: int, eos_id: int | None = None
    ) -> ScriptedServer:
        """Return a server that gives `texts[turn]`, markup included, in each episode; a call beyond the last is rejected."""

        def script(call: ScriptedCall) -> ScriptedReply:
            if call.turn >= len(texts):
                raise RequestRejected(
                    f"the script has {len(texts)} turns; episode {call.episode_id!r} asked for one more", status=400
                )
            return ScriptedReply(output=texts[call.turn])

        return cls(script, vocab_size=vocab_size, encode=encode, eos_id=eos_id)

    @property
    def calls(self) -> Sequence[ScriptedCall]:
        """All calls that the script was asked to answer, in order."""
        return self.engine.player.calls

    @property
    def url(self) -> str:
        """The server's name in messages."""
        return self._url

    @property
    def version(self) -> int:
        """Policy version of the weights."""
        return self.engine.version

    @property
    def policy_version(self) -> int:
        return self.engine.version

    @property
    def paused(self) -> bool:
        """Whether the server is paused."""
        return self._paused

    @property
    def checksum_kind(self) -> str:
        return "agentrl"

    @property
    def dtype(self) -> str:
        return "float32"

    async def generate(self, request: GenerateRequest) -> Generation:
        """Return the script's answer, as `Backend.generate` does.

        Raises:
            ServerError: the error that the script's fault stands for.
            ConfigError: if the script's reply cannot be played.

        Cancellation: the request id is added to `aborted`.
        """
        check_request(request, self._vocab_size)
        with Deadline(self._timeout_s, lambda: f"{self.url}: request {request.request_id} got no answer", self.url):
            async with aclosing(_ScriptedChunks(self, request, streamed=False)) as chunks:
                while (last := await anext(chunks)).generation is None:
                    pass
        return last.generation

    @asynccontextmanager
    async def stream(self, request: GenerateRequest) -> AsyncGenerator[AsyncIterator[GenerationChunk], None]:
        """Yield the script's answer, one token at a time, as `Backend.stream` does.

        Raises:
            ServerError: the error that the script's fault stands for.

        Cancellation: the request id is added to `aborted`, also when the block is left early.
        """
        check_request(request, self._vocab_size)
        async with aclosing(_ScriptedChunks(self, request, streamed=True)) as chunks:
            yield chunks

    async def give_up(self, request_id: str) -> None:
        """Have a call return the tokens it has; its id is added to `aborted`."""
        await anyio.lowlevel.checkpoint()
        playback = self.running.get(request_id)
        if playback is not None and not playback.is_given_up:
            self.aborted.append(request_id)
            playback.give_up()

    def release(self, episode_id: str) -> None:
        """Do nothing: one server serves every episode."""

    async def end_session(self, episode_id: str) -> None:
        """Record the end in `ended_sessions`."""
        await anyio.lowlevel.checkpoint()
        self.ended_sessions.append(episode_id)

    def die(self, reason: str = "killed") -> None:
        """End all calls with `ServerUnavailable`, and refuse new ones."""
        self._dead = reason
        self._died.set()
        for playback in self.engine.player.playing.values():
            playback.abort("died")

    def revive(self, version: int = 0) -> None:
        """Answer again, as a restarted process would: not paused, with the weights of `version`."""
        self._dead, self._paused = None, False
        self._died = anyio.Event()
        self.engine.player.version = version
        self.engine.unpause()

    async def update_weights(self, source: WeightSource, probe: Probe | None = None) -> UpdateReport:
        """Pause, take over the version, continue, and compare `scripted_logprobs` with the probe.

        Raises:
            WeightSyncError: if a control fault causes it, or the probe differs.

        Cancellation: the server continues.
        """
        members = Members([self])

        async def each(action: Callable[[Member], Awaitable[None]]) -> Sequence[Member]:
            for member in members.all:
                await action(member)
            return members.all

        try:
            swap = await WeightSwap(members, source, "retract", retries=0).run(members.all, each, lambda: None, again=False)
        finally:
            self._paused = False
            self.engine.unpause()
        difference = None
        if probe is not None:
            differences = np.abs(await self.score(probe.token_ids) - probe.logprobs)
            difference = float(differences.max())
            if (excess := probe.tolerance.excess(differences)) is not None:
                raise WeightSyncError(f"{self._url}: the probe differs from the trainer's by {excess}")
        return UpdateReport(
            version=self.version,
            pause_after_s=swap.pause_after_s,
            pause_s=swap.pause_s,
            updated=(self._url,),
            probe_difference=difference,
            num_bytes=swap.num_bytes,
            trainer_digest=swap.trainer_digest,
            server_digests=swap.server_digests,
        )

    async def connect(self) -> None:
        """Do nothing unless a hold or a fault applies."""
        await self.control("connect")

    async def aclose(self) -> None:
        """Do nothing: there is no connection to close."""

    async def check(self) -> int:
        """Return the policy version of the weights."""
        await self.control("check")
        return self.version

    async def pause(self, mode: Literal["retract", "in_place"]) -> None:
        """Hold all replies before their next token."""
        self._paused = True
        await self.control("pause")
        await self.engine.pause(mode)

    async def resume(self) -> None:
        """Continue all replies."""
        self._paused = False
        await self.control("resume")
        self.engine.unpause()

    async def load_weights(self, publication: Publication) -> None:
        """Take over the version and the digests of a publication without reading its files."""
        await self.control("load_weights")
        self.engine.serve(publication.tensor_checksums, publication.version)
        self.updates.append(publication)

    async def checksums(self) -> Mapping[str, str]:
        """Return the digests of the last weight update, reversed with `Fault.WRONG_WEIGHTS`."""
        await self.control("checksums")
        return self.engine.checksums()

    async def score(self, token_ids: Int32Array) -> Float32Array:
        """Return the `scripted_logprobs` of the current version, [L-1] float32, nats."""
        await self.control("score")
        return self.engine.scores(token_ids)

    def accept_manifest(self, manifest: Manifest) -> None:
        """Take over the version and the digests of weights from a trainer's memory."""
        self.engine.serve(scripted_checksums(manifest.version, manifest.buckets), manifest.version)

    async def control(self, name: ControlCall) -> Fault | None:
        """Apply the hold and the fault of a control call; return the fault if the call continues in spite of it."""
        if (hold := self.control_holds.get(name)) is not None:
            hold.reached.set()
            with Deadline(self._timeout_s, lambda: f"{self._url}: waited for {name}", self._url):
                await hold.release.wait()
        fault = self.control_faults.get(name)
        if fault is Fault.HANG:
            with Deadline(self._timeout_s, lambda: f"{self._url}: waited for {name}", self._url):
                await self._died.wait()
        if self._dead is not None or fault in (Fault.REFUSE, Fault.DIE):
            raise ServerUnavailable(f"{self._url}: refused {name}: {self._dead or fault}", url=self._url)
        if fault is Fault.BAD_REQUEST and name in ("load_weights", "join_group", "receive_weights"):
            raise WeightSyncError(f"{self._url}: did not {name}: {fault}")
        if fault is Fault.BAD_REQUEST:
            raise RequestRejected(f"{self._url}: HTTP 400 to {name}", status=400, url=self._url)
        await anyio.lowlevel.checkpoint()
        return fault

    async def misbehave(self, fault: Fault | None) -> None:
        """Raise what a fault stands for that acts before the first token, or the death of the server."""
        await anyio.lowlevel.checkpoint()
        if fault in (Fault.HANG, Fault.SLOW_DRIP):
            with Deadline(self._timeout_s, lambda: f"{self._url}: a model call got no answer", self._url):
                await self._died.wait()
        if self._dead is not None or fault is Fault.REFUSE:
            raise ServerUnavailable(f"{self._url}: refused: {self._dead or 'scripted'}", url=self._url)
        if fault is Fault.BAD_REQUEST:
            raise RequestRejected(f"{self._url}: HTTP 400, as scripted", status=400, url=self._url)
        if fault is Fault.SERVER_ERROR:
            raise ServerUnavailable(f"{self._url}: HTTP 500, as scripted", status=500, url=self._url)
        if fault is Fault.NOT_JSON:
            raise ReplyError(f"{self._url}: the reply is a web page, as scripted", url=self._url)


class _ScriptedChunks(AsyncIterator[GenerationChunk]):
    """The answer to one call, token by token; a cancelled `anext` loses nothing."""

    def __init__(self, server: ScriptedServer, request: GenerateRequest, *, streamed: bool) -> None:
        self._server, self._request, self._streamed = server, request, streamed
        self._assembly = Assembly(request, server.url)
        self._playback: Playback | None = None
        self._has_begun = False
        """Whether the piece in play is past the faults that act before its first token."""
        self._ended = False

    async def __anext__(self) -> GenerationChunk:
        if self._ended:
            raise StopAsyncIteration
        try:
            while not self._assembly.done:
                token = await self._play()
                if token is not None:
                    return GenerationChunk(output_ids=np.array([token], np.int32))
        except Exception:
            self._finish()
            raise
        self._ended = True
        return GenerationChunk(output_ids=np.empty(0, np.int32), generation=self._assembly.generation())

    async def _play(self) -> int | None:
        """Play a token of the piece in play, or of a new one; None where a piece ended."""
        server = self._server
        if self._playback is None:
            await server.misbehave(None)
            self._playback = server.engine.player.begin(_rest_of(self._assembly), self._request.episode_id)
            server.running[self._request.request_id] = self._playback
            self._has_begun = False
        playback = self._playback
        if not self._has_begun:
            await playback.unless_aborted(partial(server.misbehave, playback.reply.fault))
            self._has_begun = True
        if await playback.play_token():
            if playback.reply.fault in (Fault.DIE, Fault.RESET_MID_BODY):
                raise ServerUnavailable(f"{server.url}: died mid-request, as scripted", url=server.url)
            return playback.progress.output_ids[-1]
        await server.misbehave(None)
        self._finish()
        reply = parse_reply(orjson.dumps(playback.body()), vocab_size=server.engine.player.vocab_size, url=server.url)
        self._assembly.take(reply, caller_aborted=playback.is_given_up, streamed=self._streamed)
        return None

    def _finish(self) -> None:
        playback, self._playback = self._playback, None
        if playback is not None:
            self._server.running.pop(self._request.request_id, None)
            self._server.engine.player.finish(playback.progress.request.rid)

    async def aclose(self) -> None:
        """End the call; an unfinished one counts as aborted."""
        if not self._ended and (self._playback is not None and not self._playback.is_given_up):
            self._server.aborted.append(self._request.request_id)
        self._ended = True
        self._finish()


def _rest_of(assembly: Assembly) -> EngineRequest:
    """Return the request for the missing tokens of a call, as the engine takes it."""
    request = assembly.request
    rid, _ = assembly.body()
    sampling = {name: getattr(request.sampling, name) for name in _SAMPLING}
    sampling["max_new_tokens"] -= len(assembly.output_ids)
    return EngineRequest(
        rid=rid,
        input_ids=[*request.input_ids.tolist(), *assembly.output_ids.tolist()],
        sampling=EngineSampling(**sampling),
    )


class ScriptedReceiver:
    """A `Receiver` that records calls and transfers nothing."""

    def __init__(self, server: ScriptedServer) -> None:
        self._server = server
        self.joined: list[GroupAddress] = []
        """Groups joined, in order."""
        self.left: list[str] = []
        """Groups left, in order."""
        self.received: list[Manifest] = []
        """Manifests of the weights received, in order."""

    def request(self) -> GroupRequest:
        """Return a request for one rank in a new group."""
        return GroupRequest(f"{self._server.url}/{len(self.joined)}", ranks=1, nccl=False, flat=True)

    async def join(self, address: GroupAddress) -> None:
        """Record the group."""
        await self._server.control("join_group")
        self.joined.append(address)

    async def leave(self, name: str) -> None:
        """Record that the group was left."""
        self.left.append(name)

    async def receive(self, manifest: Manifest, group: str) -> None:
        """Take over the version and the digests; refuse if `group` is not the group joined last."""
        await self._server.control("receive_weights")
        if not self.joined or group != self.joined[-1].name:
            raise WeightSyncError(f"{self._server.url}: is not in the group {group}")
        self.received.append(manifest)
        self._server.accept_manifest(manifest)
