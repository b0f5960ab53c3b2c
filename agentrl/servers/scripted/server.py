"""A server that answers from a script: for agentrl's tests and for those of your workflows. No model, no torch, no sockets.

Invariant: it keeps every promise of `Backend` and `Inference` that a real server keeps, and breaks exactly those a
`Fault` names; its replies pass through the same checks as those of a real server. Runs under asyncio and trio.

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

A script is a function, so it can look at the call, and fail as it likes:

    def script(call: ScriptedCall) -> ScriptedReply:
        if call.index == 0:
            return ScriptedReply(fault=Fault.REFUSE)
        return ScriptedReply(output="The answer is 4")

The control calls of a scripted server: pause, load, verify, continue, and how each can be made to fail.

Invariant: a control call does its whole work or none of it, and with a fault it raises what a real server's would.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from typing import Literal

import anyio
import anyio.lowlevel
import numpy as np
import orjson

from agentrl.concurrency import Deadline
from agentrl.errors import ReplyError, RequestRejected, ServerUnavailable, WeightSyncError
from agentrl.inference.backend import GenerateRequest, Generation, GenerationChunk, Probe, UpdateReport, WeightSource
from agentrl.inference.sglang.assembly import Assembly
from agentrl.inference.sglang.wire import check_request, parse_reply
from agentrl.servers.scripted.playback import ScriptPlayer
from agentrl.servers.scripted.script import (
    Fault,
    Hold,
    Script,
    ScriptedCall,
    ScriptedReply,
    TextDecoder,
    TextEncoder,
    scripted_logprobs,
)
from agentrl.types import Float32Array, Int32Array
from agentrl.weights.types import GroupAddress, GroupRequest, Manifest, Publication, scripted_checksums

ControlCall = Literal[
    "connect", "check", "pause", "load_weights", "checksums", "score", "resume", "join_group", "receive_weights"
]


class ScriptedControl:
    """What a scripted server does besides answering model calls."""

    def __init__(self, player: ScriptPlayer, *, url: str, timeout_s: float) -> None:
        """Begin alive and not paused; see `ScriptedServer` for the arguments."""
        self.player = player
        self._url = url
        self._timeout_s = timeout_s
        self._dead: str | None = None
        self._died = anyio.Event()
        self._paused = False
        self.max_context_tokens: int | None = None
        """What it says of its context; scripts take any."""
        self._tensor_checksums: Mapping[str, str] = {}
        self.updates: list[Publication] = []
        """Weights it was given from files, in order."""
        self.groups = ScriptedReceiver(self)
        """Its part in taking weights from a trainer's memory; nothing is really sent."""
        self.control_faults: dict[ControlCall, Fault] = {}
        """What the control calls do instead of their work; change it at any time."""
        self.control_holds: dict[ControlCall, Hold] = {}
        """Control calls that wait before their work, each until its hold is released."""

    @property
    def url(self) -> str:
        """Its name in messages."""
        return self._url

    @property
    def version(self) -> int:
        """Of its weights."""
        return self.player.version

    @property
    def policy_version(self) -> int:
        """Of its weights."""
        return self.player.version

    @property
    def paused(self) -> bool:
        """Whether it is paused."""
        return self._paused

    @property
    def checksum_kind(self) -> str:
        """`agentrl`."""
        return "agentrl"

    def die(self, reason: str = "killed") -> None:
        """End all calls with `ServerUnavailable`, and refuse new ones."""
        self._dead = reason
        self._died.set()
        for playback in self.player.playing.values():
            playback.abort("died")

    def revive(self, version: int = 0) -> None:
        """Answer again, as a new process would: not paused, with the weights it was first started with."""
        self._dead, self._paused = None, False
        self._died = anyio.Event()
        self.player.version = version
        self.player.resume()

    async def update_weights(self, source: WeightSource, probe: Probe | None = None) -> UpdateReport:
        """Pause, take over the version, continue, and compare `scripted_logprobs` with the probe.

        Raises:
            WeightSyncError: a control fault says so, or the probe differs.

        Cancellation: the server is continued.
        """
        began = anyio.current_time()
        try:
            await self.pause("retract")
            num_bytes = await self._take(source)
        finally:
            self._continue()
        pause_s = anyio.current_time() - began
        difference = None
        if probe is not None:
            difference = float(np.abs(await self.score(probe.token_ids) - probe.logprobs).max())
            if not difference <= probe.tolerance:
                raise WeightSyncError(f"{self._url}: the probe differs by {difference:.2e} nats from the trainer's")
        return UpdateReport(
            version=self.version, pause_s=pause_s, updated=(self._url,), probe_difference=difference, num_bytes=num_bytes
        )

    async def connect(self) -> None:
        """See `Server.connect`."""
        await self.control("connect")

    async def aclose(self) -> None:
        """Do nothing: there is nothing to close."""

    async def check(self) -> int:
        """See `Server.check`."""
        await self.control("check")
        return self.version

    async def pause(self, mode: Literal["retract", "in_place"]) -> None:
        """See `Server.pause`."""
        self._paused = True
        await self.control("pause")
        self.player.pause(retract=mode == "retract")

    async def resume(self) -> None:
        """See `Server.resume`."""
        self._paused = False
        await self.control("resume")
        self._continue()

    async def load_weights(self, publication: Publication) -> None:
        """See `Server.load_weights`; the path is not read."""
        await self.control("load_weights")
        self.player.version = publication.version
        self._tensor_checksums = publication.tensor_checksums
        self.updates.append(publication)

    async def checksums(self) -> Mapping[str, str]:
        """Return those of the publication it was last given."""
        wrong = await self.control("checksums") is Fault.WRONG_WEIGHTS
        held = self._tensor_checksums
        return {name: digest[::-1] for name, digest in held.items()} if wrong else held

    async def score(self, token_ids: Int32Array) -> Float32Array:
        """Return `scripted_logprobs` of its version."""
        wrong = await self.control("score") is Fault.WRONG_WEIGHTS
        return scripted_logprobs(token_ids, self.version) - np.float32(0.5 if wrong else 0.0)

    async def _take(self, source: WeightSource) -> int | None:
        if isinstance(source, Publication):
            await self.load_weights(source)
            return None
        request = self.groups.request()
        [address] = await source.channel.open([request], ())
        await self.groups.join(address)
        async with source.channel.sending(
            source.version, [request.name], dtype=source.dtype, digests=True, again=False
        ) as sending:
            await sending.start([request.name])
            await self.groups.receive(sending.manifest, request.name)
            await sending.finish(())
            return sending.manifest.num_bytes

    def given(self, manifest: Manifest) -> None:
        """Take note of weights that came from a trainer's memory."""
        self.player.version = manifest.version
        self._tensor_checksums = scripted_checksums(manifest.version, manifest.buckets)

    def _continue(self) -> None:
        self._paused = False
        self.player.resume()

    async def control(self, name: ControlCall) -> Fault | None:
        """Do what the fault of a control call says; return the fault, if there is one that lets the call go on.

        Raises:
            ServerError, WeightSyncError: what the fault stands for.

        Cancellation: nothing is left behind.
        """
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
        """Do what a fault of a model call says, as far as it comes before the first token.

        Raises:
            ServerError: what the fault stands for; `ServerUnavailable` also when the server has died.

        Cancellation: nothing is left behind.
        """
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


class ScriptedReceiver:
    """A `Receiver` that pretends."""

    def __init__(self, server: ScriptedControl) -> None:
        """Begin in no group."""
        self._server = server
        self.joined: list[GroupAddress] = []
        """Groups it was told to join, in order."""
        self.left: list[str] = []
        """Groups it was told to leave, in order."""
        self.received: list[Manifest] = []
        """Weights it was given, in order."""

    def request(self) -> GroupRequest:
        """See `Receiver.request`."""
        return GroupRequest(f"{self._server.url}/{len(self.joined)}", ranks=1, nccl=False, flat=True)

    async def join(self, address: GroupAddress) -> None:
        """See `Receiver.join`."""
        await self._server.control("join_group")
        self.joined.append(address)

    async def leave(self, name: str) -> None:
        """See `Receiver.leave`."""
        self.left.append(name)

    async def receive(self, manifest: Manifest, group: str) -> None:
        """See `Receiver.receive`; refuses when `group` is not the one it joined last."""
        await self._server.control("receive_weights")
        if not self.joined or group != self.joined[-1].name:
            raise WeightSyncError(f"{self._server.url}: is not in the group {group}")
        self.received.append(manifest)
        self._server.given(manifest)


__all__ = ["Fault", "Hold", "Script", "ScriptedCall", "ScriptedReply", "ScriptedServer", "scripted_logprobs"]


class ScriptedServer(ScriptedControl):
    """Implements `Inference`, and the pool's `Server`, in process.

    What happened is recorded: `calls`, `updates` and `aborted`. What is to fail: `ScriptedReply.fault` for a model call,
    `control_faults` for a control call, `die` and `revive` for the whole server.
    """

    def __init__(
        self,
        script: Script,
        *,
        vocab_size: int,
        encode: TextEncoder | None = None,
        decode: TextDecoder | None = None,
        eos_id: int | None = None,
        url: str = "scripted://0",
        version: int = 0,
        timeout_s: float = 60.0,
    ) -> None:
        """Begin with no call answered.

        Args:
            script: answers each call with a `ScriptedReply`, text or ids.
            vocab_size: ids sent and received are below it.
            encode: turns the script's text into ids; needed only for text.
            decode: turns ids into text, control tokens included; needed only to find stop strings in a script's ids.
            eos_id: the model's end token: it ends a reply wherever it comes, and is appended to text.
            url: its name in messages.
            version: of the weights it starts with.
            timeout_s: deadline of each model and control call, seconds; what `Fault.HANG` runs into.
        """
        player = ScriptPlayer(script, vocab_size=vocab_size, encode=encode, decode=decode, eos_id=eos_id, version=version)
        super().__init__(player, url=url, timeout_s=timeout_s)
        self.aborted: list[str] = []
        """Request ids of calls that were cancelled."""

    @classmethod
    def from_texts(
        cls, encode: TextEncoder, texts: Sequence[str], *, vocab_size: int, eos_id: int | None = None
    ) -> ScriptedServer:
        """Return a server that gives `texts[turn]` in each episode; a call beyond the last is rejected.

        Args:
            encode: turns what the model would write, markup included, into ids.
            texts: one for each turn.
            vocab_size: ids are below it.
            eos_id: ends each turn.
        """

        def script(call: ScriptedCall) -> ScriptedReply:
            if call.turn >= len(texts):
                raise RequestRejected(
                    f"the script has {len(texts)} turns; episode {call.episode_id!r} asked for one more", status=400
                )
            return ScriptedReply(output=texts[call.turn])

        return cls(script, vocab_size=vocab_size, encode=encode, eos_id=eos_id)

    @property
    def calls(self) -> Sequence[ScriptedCall]:
        """All calls the script was asked, in order."""
        return self.player.calls

    async def generate(self, request: GenerateRequest) -> Generation:
        """Return what the script answers; see `Backend.generate`.

        Raises:
            ServerError: what the script's fault stands for.
            ConfigError: the script's reply cannot be played.

        Cancellation: the request id is added to `aborted`.
        """
        check_request(request, self.player.vocab_size)
        assembly = Assembly(request, self.url)
        with Deadline(self._timeout_s, lambda: f"{self.url}: request {request.request_id} got no answer", self.url):
            while not assembly.done:
                async with aclosing(self._play(assembly)) as positions:
                    async for _ in positions:
                        pass
        return assembly.generation()

    @asynccontextmanager
    async def stream(self, request: GenerateRequest) -> AsyncGenerator[AsyncIterator[GenerationChunk], None]:
        """Yield what the script answers, one token at a time; see `Backend.stream`.

        Raises:
            ServerError: as for `generate`.

        Cancellation: the request id is added to `aborted`, also when the block is left early.
        """
        check_request(request, self.player.vocab_size)
        async with aclosing(self._chunks(request)) as chunks:
            yield chunks

    def release(self, episode_id: str) -> None:
        """Do nothing: one server is every episode's home."""

    async def _chunks(self, request: GenerateRequest) -> AsyncGenerator[GenerationChunk, None]:
        assembly = Assembly(request, self.url)
        while not assembly.done:
            async with aclosing(self._play(assembly, streamed=True)) as positions:
                async for token in positions:
                    yield GenerationChunk(output_ids=np.array([token], np.int32))
        yield GenerationChunk(output_ids=np.empty(0, np.int32), generation=assembly.generation())

    async def _play(self, assembly: Assembly, *, streamed: bool = False) -> AsyncGenerator[int, None]:
        """Play one piece, yield its tokens, and add it to the assembly."""
        request, sampled = assembly.request, assembly.output_ids
        sampling = replace(request.sampling, max_new_tokens=request.sampling.max_new_tokens - len(sampled))
        rid, _ = assembly.body()
        await self.misbehave(None)
        playback = self.player.begin(rid, request.episode_id, np.concatenate([request.input_ids, sampled]), sampling)
        fault = playback.reply.fault
        try:
            await self.misbehave(fault)
            async with aclosing(playback.tokens()) as positions:
                async for _ in positions:
                    if fault in (Fault.DIE, Fault.RESET_MID_BODY):
                        raise ServerUnavailable(f"{self.url}: died mid-request, as scripted", url=self.url)
                    yield playback.ids[-1]
            await self.misbehave(None)
        except BaseException as error:
            if not isinstance(error, Exception):  # cancelled, or the stream was left
                self.aborted.append(request.request_id)
            raise
        finally:
            self.player.finish(rid)
        reply = parse_reply(orjson.dumps(playback.body(rid)), vocab_size=self.player.vocab_size, url=self.url)
        assembly.take(reply, caller_aborted=False, streamed=streamed)
