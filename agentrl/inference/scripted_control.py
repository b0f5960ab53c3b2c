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
from agentrl.inference.base import Probe, UpdateReport
from agentrl.inference.performance import Stage
from agentrl.inference.scope import deadline
from agentrl.inference.script import Fault, scripted_logprobs
from agentrl.types import Float32Array, Int32Array, Publication

ControlCall = Literal["connect", "check", "pause", "load_weights", "checksums", "score", "resume"]


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
        self._tensor_checksums: Mapping[str, str] | None = None
        self.updates: list[Publication] = []
        """Weights it was given, in order."""
        self.control_faults: dict[ControlCall, Fault] = {}
        """What the control calls do instead of their work; change it at any time."""

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

    async def update_weights(self, publication: Publication, probe: Probe | None = None) -> UpdateReport:
        """Pause, take over the version, continue, and compare `scripted_logprobs` with the probe.

        Raises:
            WeightSyncError: a control fault says so, or the probe differs.

        Cancellation: the server is continued.
        """
        began = anyio.current_time()
        try:
            await self.pause("retract")
            await self.load_weights(publication)
        finally:
            self._continue()
        pause_s = anyio.current_time() - began
        difference = None
        if probe is not None:
            difference = float(np.abs(await self.score(probe.token_ids) - probe.logprobs).max())
            if not difference <= probe.tolerance:
                raise WeightSyncError(f"{self._url}: the probe differs by {difference:.2e} nats from the trainer's")
        return UpdateReport(version=self.version, pause_s=pause_s, updated=(self._url,), probe_difference=difference)

    async def connect(self) -> None:
        """See `Server.connect`."""
        await self._control("connect")

    async def aclose(self) -> None:
        """Do nothing: there is nothing to close."""

    async def check(self) -> int:
        """See `Server.check`."""
        await self._control("check")
        return self.version

    async def pause(self, mode: Literal["retract", "in_place"]) -> None:
        """See `Server.pause`."""
        self._paused = True
        await self._control("pause")
        self.stage.pause(retract=mode == "retract")

    async def resume(self) -> None:
        """See `Server.resume`."""
        self._paused = False
        await self._control("resume")
        self._continue()

    async def load_weights(self, publication: Publication) -> None:
        """See `Server.load_weights`; the path is not read."""
        await self._control("load_weights")
        self.stage.version = publication.version
        self._tensor_checksums = publication.tensor_checksums
        self.updates.append(publication)

    async def checksums(self) -> Mapping[str, str] | None:
        """Return those of the publication it was last given."""
        wrong = await self._control("checksums") is Fault.WRONG_WEIGHTS
        held = self._tensor_checksums
        return {name: digest[::-1] for name, digest in held.items()} if wrong and held is not None else held

    async def score(self, token_ids: Int32Array) -> Float32Array:
        """Return `scripted_logprobs` of its version."""
        wrong = await self._control("score") is Fault.WRONG_WEIGHTS
        return scripted_logprobs(token_ids, self.version) - np.float32(0.5 if wrong else 0.0)

    def _continue(self) -> None:
        self._paused = False
        self.stage.resume()

    async def _control(self, name: ControlCall) -> Fault | None:
        fault = self.control_faults.get(name)
        if fault is Fault.HANG:
            with deadline(self._timeout_s, lambda: f"{self._url}: waited for {name}", self._url):
                await self._died.wait()
        if self._dead is not None or fault in (Fault.REFUSE, Fault.DIE):
            raise ServerUnavailable(f"{self._url}: refused {name}: {self._dead or fault}", url=self._url)
        if fault is Fault.BAD_REQUEST and name == "load_weights":
            raise WeightSyncError(f"{self._url}: did not load: {fault}")
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
            with deadline(self._timeout_s, lambda: f"{self._url}: a model call got no answer", self._url):
                await self._died.wait()
        if self._dead is not None or fault is Fault.REFUSE:
            raise ServerUnavailable(f"{self._url}: refused: {self._dead or 'scripted'}", url=self._url)
        if fault is Fault.BAD_REQUEST:
            raise RequestRejected(f"{self._url}: HTTP 400, as scripted", status=400, url=self._url)
        if fault is Fault.SERVER_ERROR:
            raise ServerUnavailable(f"{self._url}: HTTP 500, as scripted", status=500, url=self._url)
        if fault is Fault.NOT_JSON:
            raise ReplyError(f"{self._url}: the reply is a web page, as scripted", url=self._url)
