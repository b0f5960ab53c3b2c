"""One host of containers, as a run sees it: its state, the requests to it, and the workbenches that it holds for the run.

Invariant: when a host is known to be gone, every call to it that waits ends at once, with an `EnvironmentFault` that names
the host.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Final

import aiohttp
import anyio
import anyio.to_thread
import msgspec
from anyio.abc import TaskGroup

from agentrl.errors import ConfigError, EnvironmentFault
from agentrl.support.concurrency import task_group
from agentrl_sandbox.containers.container import Container
from agentrl_sandbox.containers.layer_files import read_layer_files
from agentrl_sandbox.containers.protocol import ANY_IMAGE, START_S, BenchRole, LayerFile, Variables, without_network
from agentrl_sandbox.containers.reserve import OpenRoles
from agentrl_sandbox.passage import Port, Way, carry_bytes, way_to
from agentrl_sandbox.remote.client import HostConnection, RemoteSupervisor, decode_answer, said_in
from agentrl_sandbox.remote.socket_bytes import PING_S, socket_bytes
from agentrl_sandbox.remote.wire import (
    AddBody,
    BenchBody,
    HostState,
    KeepBody,
    Opened,
    ReadBody,
    RunBody,
    SnapshotBody,
    StateBody,
    digest_of,
    exceeded,
)
from agentrl_sandbox.session import Session
from agentrl_sandbox.types import Limits

BEAT_TIMEOUT_S: Final = 15.0
"""Seconds that a host has to tell its state."""
CALL_S: Final = 120.0
"""Seconds that a request may take beyond what its program may take; a busy host starts environments one after another."""
_CLOSE_S: Final = 30.0
_WAITING: Final = 2
"""Web sockets that wait for the next connections of a container."""
_AGAIN_S: Final = 0.5


class RemoteHost(HostConnection):
    """A host, which `HostFleet` looks after.

    Args:
        url: its address.
        http: the way to it, with its key.
        client: the name of this run there.
    """

    def __init__(self, url: str, http: aiohttp.ClientSession, client: str) -> None:
        super().__init__(url, http, grace_s=CALL_S)
        self.client = client
        self.state: HostState | None = None
        """None: it is gone, or has never answered."""
        self.why_gone = "it has not answered yet"
        self.num_placed = 0
        """Environments of this run on it, with those that it is opening."""
        self._reserved: list[tuple[BenchRole, float]] = []
        """Roles and memory limits, in MiB, of those that are to be opened, which its state does not know yet."""
        self._maxima: Limits | None = None
        """The most that it gives; None: it has not answered, or does not say."""
        self._has_answered = False
        self._calls: set[anyio.CancelScope] = set()

    @property
    def free_mb(self) -> float:
        """Memory for further environments, in MiB."""
        return -1.0 if self.state is None else self.state.free_mb - self.state.share * sum(mb for _, mb in self._reserved)

    def misfit(self, image: str | None, limits: Limits) -> str | None:
        """Return why no such environment can be opened there, now or later; None: one can."""
        state = self.state
        if state is None:
            return self.describe()
        if not state.max_open:
            return f"{self.url} gives no containers; start it with `agentrl sandbox-host`"
        if image is not None and image not in state.images and ANY_IMAGE not in state.images:
            return f"{self.url} has the images {sorted(state.images) or 'none'} (--image {image}=FOLDER)"
        over = None if self._maxima is None else exceeded(limits, self._maxima)
        return None if over is None else f"{self.url}: {over}"

    def pair_misfit(self, limits: Limits) -> str | None:
        """Return why a first and a second environment, of which each fits, do not fit together; None: they do."""
        state = self.state
        if state is None:
            return None
        if state.max_open < 2:
            return f"{self.url} holds one at a time (--max-open)"
        needed = 2 * limits.memory_mb * state.share
        if 0 < state.memory_mb < needed:
            return f"{self.url} has {state.memory_mb} MiB for environments (--memory-mb), and two count for {needed:.0f} MiB"
        return None

    def has_room_for(self, limits: Limits, role: BenchRole) -> bool:
        """Return whether there is room for a further environment, as far as is known here."""
        state = self.state
        if state is None:
            return False
        roles, needed = OpenRoles(state.num_seconds, state.seconds_mb, state.spare_mb), limits.memory_mb * state.share
        for reserved, memory_mb in self._reserved:
            roles = roles.plus(reserved, memory_mb * state.share)
        kept = roles.reserve_beside(role, needed)
        places = state.max_open - state.num_open - len(self._reserved)
        return places > kept.places and self.free_mb >= needed + kept.memory_mb

    def reserve(self, limits: Limits, role: BenchRole) -> None:
        """Keep room for an environment that is to be opened."""
        self._reserved.append((role, limits.memory_mb))

    def release(self, limits: Limits, role: BenchRole) -> None:
        """Give back what `reserve` kept: the environment is open, or could not be opened."""
        self._reserved.remove((role, limits.memory_mb))

    def describe(self) -> str:
        """Return its address and state for a message."""
        if self.state is None:
            return f"{self.url} is gone: {self.why_gone}"
        return f"{self.url} has {self.state.num_open} of {self.state.max_open} open and {self.free_mb:.0f} MiB free"

    def lose(self, why: str) -> str:
        """Take note that the host is gone, and end the calls that wait for it; return the message for its episodes."""
        if self.state is not None:
            self.state, self.why_gone = None, why
            for scope in self._calls:
                scope.cancel()
        return (
            f"containers: the host {self.url} is gone: {self.why_gone}; {self.num_placed} environments of this run were on "
            "it, whose episodes fail and run again on other hosts"
        )

    def move(self, url: str) -> None:
        """Look for the host at another address from now on: it has started again there."""
        self.lose(f"it starts again at {url}")
        self.url = url.rstrip("/")

    async def beat(self) -> None:
        """Ask for its state, which tells it that this run lives; a host that does not answer is gone."""
        body = msgspec.json.encode(StateBody(client=self.client))
        try:
            with anyio.fail_after(BEAT_TIMEOUT_S):
                status, answer = await self.request("POST", "/state", body)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            self.why_gone = f"{type(error).__name__}: {error}".rstrip(": ")
            self.lose(self.why_gone)
            return
        if status != 200:
            said = f"it answered {status}: {said_in(answer)}"
            if self._has_answered:
                self.lose(said)
                return
            raise ConfigError(f"containers: {self.url}: {said}; check the address and its key")
        self._has_answered = True
        state = decode_answer(answer, HostState)
        if self.state is not None and self.state.instance != state.instance:
            self.lose("it restarted")
        self.state, self._maxima = state, Limits.model_validate(state.maxima) if state.maxima else None

    async def send(self, method: str, path: str, body: bytes, patience_s: float) -> tuple[int, bytes]:
        """Send one request and return status and body; a host that is gone is an EnvironmentFault at once."""
        if self.state is None:
            raise EnvironmentFault(self.lose(""))
        with anyio.CancelScope() as scope:
            self._calls.add(scope)
            try:
                return await super().send(method, path, body, patience_s)
            finally:
                self._calls.discard(scope)
        raise EnvironmentFault(self.lose(""))  # `lose` cancelled the call

    async def carry(self, path: str, way: Way, tasks: TaskGroup) -> None:
        """Wait for a connection of a container and carry it on, while another task waits for the next."""
        while self.state is not None:
            try:
                async with self._http.ws_connect(self.url + path, heartbeat=PING_S, max_msg_size=0) as socket:
                    tasks.start_soon(self.carry, path, way, tasks)
                    with suppress(OSError):
                        async with way.connect() as outer, socket_bytes(socket) as inner:
                            await carry_bytes(inner, outer)
                return
            except aiohttp.WSServerHandshakeError:
                return  # the container has ended
            except (aiohttp.ClientError, OSError):
                await anyio.sleep(_AGAIN_S)

    @asynccontextmanager
    async def workbench(self, image: str | None, limits: Limits, role: BenchRole) -> AsyncGenerator[RemoteWorkbench]:
        """Open a workbench there."""
        self.num_placed += 1
        try:
            body = BenchBody(client=self.client, image=image, limits=limits.model_dump(), role=role)
            opened = await self.ask("/benches", body, Opened, patience_s=START_S)
            self._note(opened.state)
            try:
                yield RemoteWorkbench(self, f"/benches/{opened.name}", limits)
            finally:
                answer = await self.close(f"/benches/{opened.name}", _CLOSE_S)
                with suppress(msgspec.DecodeError):
                    self._note(msgspec.json.decode(answer, type=HostState))
        finally:
            self.num_placed -= 1

    def _note(self, state: HostState | None) -> None:
        if self.state is not None and state is not None and state.instance == self.state.instance:
            self.state = state


class RemoteWorkbench:
    """A workbench on a host."""

    def __init__(self, host: RemoteHost, path: str, limits: Limits) -> None:
        self._host, self._path, self.limits = host, path, limits

    async def add(self, files: Mapping[str, LayerFile]) -> None:
        """Put a layer over the others as `Workbench.add` describes."""
        body = AddBody(files=await anyio.to_thread.run_sync(read_layer_files, files))
        await self._host.ask(f"{self._path}/add", body, dict[str, str])

    @asynccontextmanager
    async def run(
        self,
        *,
        directory: str = "/",
        environment: Variables = None,
        limits: Limits | None = None,
        port: Port | None = None,
        network: str | None = None,
    ) -> AsyncGenerator[Container]:
        """Start a container as `Workbench.run` describes; its connections to the port come here over web sockets."""
        if network is not None:
            raise without_network(network, "hosts")
        way, limits = None if port is None else way_to(port), limits or self.limits
        inner = None if way is None else way.port
        body = RunBody(directory=directory, environment=dict(environment or {}), limits=limits.model_dump(), port=inner)
        opened = await self._host.ask(f"{self._path}/sessions", body, Opened, patience_s=START_S)
        path = f"/sessions/{opened.name}"
        try:
            async with task_group() as tasks:
                if way is not None:
                    for _ in range(_WAITING):
                        tasks.start_soon(self._host.carry, f"{path}/port", way, tasks)
                yield Container(Session(RemoteSupervisor(self._host, path), limits), directory)
                tasks.cancel_scope.cancel()
        except BaseException:
            await self._host.close(path, _CLOSE_S)
            raise
        status, answer = await self._host.send("DELETE", path, b"", _CLOSE_S)
        if status != 200:
            raise EnvironmentFault(f"containers: {self._host.url} could not end a container: {said_in(answer)}")

    async def keep(self, paths: Sequence[str], *, homes: Sequence[str] = ()) -> None:
        """Keep parts of the newest layer as `Workbench.keep` describes."""
        await self._host.ask(f"{self._path}/keep", KeepBody(paths=list(paths), homes=list(homes)), dict[str, str])

    async def changed(self) -> list[str]:
        """Return the absolute paths of what stands at the top of the newest layer."""
        return await self._host.ask(f"{self._path}/changed", None, list[str])

    async def read(self, path: str, *, max_bytes: int = 65_536) -> bytes:
        """Return a file of the newest layer as `Workbench.read` describes."""
        return await self._host.ask(f"{self._path}/read", ReadBody(path=path, max_bytes=max_bytes), bytes)

    async def snapshot(self) -> bytes:
        """Return the layers as `Workbench.snapshot` describes; the host remembers them for a while."""
        return await self._host.ask(f"{self._path}/snapshot", None, bytes)

    async def restore(self, snapshot: bytes) -> None:
        """Put layers over those that are there as `Workbench.restore` describes; they are sent where the host lacks them."""
        path = f"{self._path}/restore"
        known = SnapshotBody(digest=await digest_of(snapshot))
        status, answer = await self._host.send("POST", path, msgspec.json.encode(known), 0)
        if status == 404:
            await self._host.ask(path, SnapshotBody(content=snapshot), dict[str, str])
        elif status != 200:
            raise EnvironmentFault(f"containers: {self._host.url} could not restore a snapshot: {said_in(answer)}")
