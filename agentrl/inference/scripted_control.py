"""The control calls of a scripted server: pause, load, verify, continue, and how each can be made to fail.

Invariant: a control call does its whole work or none of it, and with a fault it raises what a real server's would.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import anyio
import anyio.lowlevel
import numpy as np

from agentrl.errors import ReplyError, RequestRejected, ServerUnavailable, WeightSyncError
from agentrl.inference.base import Probe, UpdateReport, WeightSource
from agentrl.inference.performance import Stage
from agentrl.inference.scope import Deadline
from agentrl.inference.script import Fault, Hold, scripted_logprobs
from agentrl.transfer import GroupAddress, GroupRequest, Manifest, scripted_checksums
from agentrl.types import Float32Array, Int32Array, Publication

ControlCall = Literal[
    "connect", "check", "pause", "load_weights", "checksums", "score", "resume", "join_group", "receive_weights"
]


class ScriptedControl:
    """What a scripted server does besides answering model calls."""

    def __init__(self, stage: Stage, *, url: str, timeout_s: float) -> None:
        """Begin alive and not paused; see `ScriptedServer` for the arguments."""
        self.stage = stage
        self._url = url
        self._timeout_s = timeout_s
        self._dead: str | None = None
        self._died = anyio.Event()
        self._paused = False
        self.max_context_tokens: int | None = None
        """What it says of its context; scripts take any."""
        self._tensor_checksums: Mapping[str, str] | None = None
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
        return self.stage.version

    @property
    def policy_version(self) -> int:
        """Of its weights."""
        return self.stage.version

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
        for performance in self.stage.playing.values():
            performance.abort("died")

    def revive(self, version: int = 0) -> None:
        """Answer again, as a new process would: not paused, with the weights it was first started with."""
        self._dead, self._paused = None, False
        self._died = anyio.Event()
        self.stage.version = version
        self.stage.resume()

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
        self.stage.pause(retract=mode == "retract")

    async def resume(self) -> None:
        """See `Server.resume`."""
        self._paused = False
        await self.control("resume")
        self._continue()

    async def load_weights(self, publication: Publication) -> None:
        """See `Server.load_weights`; the path is not read."""
        await self.control("load_weights")
        self.stage.version = publication.version
        self._tensor_checksums = publication.tensor_checksums
        self.updates.append(publication)

    async def checksums(self) -> Mapping[str, str] | None:
        """Return those of the publication it was last given."""
        wrong = await self.control("checksums") is Fault.WRONG_WEIGHTS
        held = self._tensor_checksums
        return {name: digest[::-1] for name, digest in held.items()} if wrong and held is not None else held

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
        self.stage.version = manifest.version
        self._tensor_checksums = scripted_checksums(manifest.version, manifest.buckets)

    def _continue(self) -> None:
        self._paused = False
        self.stage.resume()

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
