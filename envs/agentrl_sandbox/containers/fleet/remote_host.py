"""One host of containers, as a run sees it: its state, the requests to it, and the workbenches that it holds for the run.

Invariant: whatever goes wrong on the way is an `EnvironmentFault` that names the host. When a host is known to be gone,
every call to it that waits ends at once.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Final, TypeVar

import aiohttp
import anyio
import anyio.to_thread
import msgspec
from anyio.abc import TaskGroup

from agentrl.errors import ConfigError, EnvironmentFault
from agentrl.support.concurrency import task_group
from agentrl_sandbox.containers.container import Container
from agentrl_sandbox.containers.fleet.host_wire import (
    AddBody,
    BenchBody,
    Content,
    FileBody,
    FileError,
    HostState,
    KeepBody,
    Names,
    Opened,
    ReadBody,
    RunBody,
    SnapshotBody,
    StateBody,
    digest_of,
    host_option,
)
from agentrl_sandbox.containers.fleet.port_bytes import PING_S, carry_bytes
from agentrl_sandbox.containers.layer_files import read_layer_files
from agentrl_sandbox.containers.protocol import ANY_IMAGE, START_S, LayerFile, Variables
from agentrl_sandbox.passage import Port
from agentrl_sandbox.remote import RemoteSupervisor, decode_answer, exceeded, said_in
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
Body = TypeVar("Body")


class NoRoom(EnvironmentFault):
    """A host has no room for a further environment."""


class RemoteHost:
    """A host, which `HostFleet` looks after.

    Args:
        url: its address.
        http: the way to it, with its key.
        client: the name of this run there.
    """

    def __init__(self, url: str, http: aiohttp.ClientSession, client: str) -> None:
        self.url, self._http, self.client = url.rstrip("/"), http, client
        self.state: HostState | None = None
        """None: it is gone, or has never answered."""
        self.why_gone = "it has not answered yet"
        self.num_placed = 0
        """Environments of this run on it, with those that it is opening."""
        self._reserved: list[float] = []
        """Memory limits, in MiB, of those that are to be opened, which its state does not know yet."""
        self._maxima: Limits | None = None
        """The most that it gives; None: it has not answered, or does not say."""
        self._has_answered = False
        self._calls: set[anyio.CancelScope] = set()

    @property
    def free_mb(self) -> float:
        """Memory for further environments, in MiB."""
        return -1.0 if self.state is None else self.state.free_mb - self.state.share * sum(self._reserved)

    def misfit(self, image: str | None, limits: Limits) -> str | None:
        """Return why such an environment cannot be opened there, now or later; None: it can."""
        state = self.state
        if state is None:
            return self.describe()
        if image is not None and image not in state.images and ANY_IMAGE not in state.images:
            return f"{self.url} has the images {sorted(state.images) or 'none'} (--image {image}=FOLDER)"
        over = None if self._maxima is None else exceeded(limits, self._maxima, host_option)
        return None if over is None else f"{self.url}: {over}"

    def has_room_for(self, limits: Limits) -> bool:
        """Return whether there is room for a further environment, as far as is known here."""
        state = self.state
        if state is None:
            return False
        return state.num_open + len(self._reserved) < state.max_open and self.free_mb >= limits.memory_mb * state.share

    def reserve(self, limits: Limits) -> None:
        """Keep room for an environment that is to be opened."""
        self._reserved.append(limits.memory_mb)

    def release(self, limits: Limits) -> None:
        """Give back what `reserve` kept: the environment is open, or could not be opened."""
        self._reserved.remove(limits.memory_mb)

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
                status, answer = await self._request("POST", "/state", body)
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
                with anyio.fail_after(patience_s + CALL_S):
                    return await self._request(method, path, body)
            except TimeoutError:
                waited_s = patience_s + CALL_S
                raise EnvironmentFault(f"containers: {self.url}{path}: no answer within {waited_s:g} s") from None
            except (aiohttp.ClientError, OSError) as error:
                raise EnvironmentFault(self.lose(f"{type(error).__name__}: {error}")) from error
            finally:
                self._calls.discard(scope)
        raise EnvironmentFault(self.lose(""))  # `lose` cancelled the call

    async def _request(self, method: str, path: str, body: bytes) -> tuple[int, bytes]:
        async with self._http.request(method, self.url + path, data=body or None) as response:
            return response.status, await response.read()

    async def ask(self, path: str, body: msgspec.Struct | None, kind: type[Body], *, patience_s: float = 0.0) -> Body:
        """Send a body and return the answer.

        Raises:
            OSError: of a file there.
            ConfigError: the host refuses the request.
            NoRoom: it has no room.
            EnvironmentFault: it could not do its part.
        """
        status, answer = await self.send("POST", path, b"" if body is None else msgspec.json.encode(body), patience_s)
        if status == 200:
            return decode_answer(answer, kind)
        if status == 422:
            error = decode_answer(answer, FileError)
            raise OSError(error.number, error.error, error.path)
        said = f"containers: {self.url}{path.partition('/benches/')[1] or path} answered {status}: {said_in(answer)}"
        if status == 400:
            raise ConfigError(said)
        raise NoRoom(said) if status == 429 else EnvironmentFault(said)

    async def carry(self, path: str, port: int, tasks: TaskGroup) -> None:
        """Wait for a connection of a container and carry it to `port` here, while another task waits for the next."""
        while self.state is not None:
            try:
                async with self._http.ws_connect(self.url + path, heartbeat=PING_S, max_msg_size=0) as socket:
                    tasks.start_soon(self.carry, path, port, tasks)
                    async with await anyio.connect_tcp("127.0.0.1", port) as stream:
                        await carry_bytes(stream, socket)
                return
            except aiohttp.WSServerHandshakeError:
                return  # the container has ended
            except (aiohttp.ClientError, OSError):
                await anyio.sleep(_AGAIN_S)

    async def close(self, path: str, patience_s: float) -> bytes:
        """Close what was opened there; whatever goes wrong is left to the host, which closes it without this run too."""
        with anyio.move_on_after(patience_s, shield=True), suppress(EnvironmentFault):
            _, answer = await self.send("DELETE", path, b"", patience_s)
            return answer
        return b""

    @asynccontextmanager
    async def workbench(self, image: str | None, limits: Limits) -> AsyncGenerator[RemoteWorkbench]:
        """Open a workbench there."""
        self.num_placed += 1
        try:
            body = BenchBody(client=self.client, image=image, limits=limits.model_dump())
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
        contents = await anyio.to_thread.run_sync(read_layer_files, files)
        body = AddBody(files={name: FileBody(content=file.content, can_run=file.can_run) for name, file in contents.items()})
        await self._host.ask(f"{self._path}/add", body, dict[str, str])

    @asynccontextmanager
    async def run(
        self, *, directory: str = "/", environment: Variables = None, limits: Limits | None = None, port: Port | None = None
    ) -> AsyncGenerator[Container]:
        """Start a container as `Workbench.run` describes; its connections to the port come here over web sockets."""
        inner, outer = (port, port) if port is None or isinstance(port, int) else port
        limits = limits or self.limits
        body = RunBody(directory=directory, environment=dict(environment or {}), limits=limits.model_dump(), port=inner)
        opened = await self._host.ask(f"{self._path}/runs", body, Opened, patience_s=START_S)
        path = f"{self._path}/runs/{opened.name}"
        try:
            async with task_group() as tasks:
                if outer is not None:
                    for _ in range(_WAITING):
                        tasks.start_soon(self._host.carry, f"{path}/port", outer, tasks)
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
        return (await self._host.ask(f"{self._path}/changed", None, Names)).names

    async def read(self, path: str, *, max_bytes: int = 65_536) -> bytes:
        """Return a file of the newest layer as `Workbench.read` describes."""
        return (await self._host.ask(f"{self._path}/read", ReadBody(path=path, max_bytes=max_bytes), Content)).content

    async def snapshot(self) -> bytes:
        """Return the layers as `Workbench.snapshot` describes; the host remembers them for a while."""
        return (await self._host.ask(f"{self._path}/snapshot", None, SnapshotBody)).content

    async def restore(self, snapshot: bytes) -> None:
        """Put layers over those that are there as `Workbench.restore` describes; they are sent where the host lacks them."""
        path = f"{self._path}/restore"
        known = SnapshotBody(digest=await digest_of(snapshot))
        status, answer = await self._host.send("POST", path, msgspec.json.encode(known), 0)
        if status == 404:
            await self._host.ask(path, SnapshotBody(content=snapshot), dict[str, str])
        elif status != 200:
            raise EnvironmentFault(f"containers: {self._host.url} could not restore a snapshot: {said_in(answer)}")
