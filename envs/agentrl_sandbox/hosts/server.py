"""A server that runs programs and gives containers to runs on other machines. `agentrl sandbox-host` runs one.

The protocol is in `agentrl_sandbox.remote.wire`. Invariant: the server listens off loopback only with a key, which every
route asks for; without one it does nothing that a web page could have asked for. It opens no environment that it has no
room for, and nothing gets more than the server gives, whatever its caller asks for. What a client that has gone started is
ended: a running call at once, a session `idle_s` after its last call, an environment `lease_s` after its run's last sign
of life.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator, Generator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from aiohttp import web
from anyio.abc import TaskGroup

from agentrl.errors import ConfigError
from agentrl.servers.listening import BODY_S, HEADERS_S, Connections, guard, listening
from agentrl.support.concurrency import task_group
from agentrl_sandbox.base import Sandbox
from agentrl_sandbox.containers import Containers, Workbench
from agentrl_sandbox.containers.kept_bytes import KeptBytes
from agentrl_sandbox.containers.protocol import CONTAINER_LIMITS, BenchRole
from agentrl_sandbox.containers.reserve import OpenRoles
from agentrl_sandbox.hosts.holding import Holding
from agentrl_sandbox.hosts.json_answers import encoded, json_refusal, read_body, refused_as_json, turned_away_as_json
from agentrl_sandbox.hosts.waiting_sockets import WaitingSockets
from agentrl_sandbox.passage import Way
from agentrl_sandbox.remote.wire import (
    AddBody,
    BenchBody,
    CallBody,
    EndedBody,
    GivenLimits,
    HostState,
    KeepBody,
    Opened,
    ProgramBody,
    ReadBody,
    RunBody,
    SessionBody,
    SnapshotBody,
    StateBody,
    digest_of,
    exceeded,
)
from agentrl_sandbox.session import REPLY_GRACE_S, Session
from agentrl_sandbox.types import MIB, Limits, Program

MAX_LIMITS: Final = Limits(
    wall_s=3600,
    cpu_s=3600,
    memory_mb=4096,
    address_space_mb=65_536,
    processes=512,
    open_files=4096,
    work_mb=1024,
    temp_mb=1024,
    shared_mb=256,
    num_files=65_536,
    output_kb=16_384,
)
"""The most that a caller may ask for, unless the server's owner gives more or less."""
MAX_SESSIONS: Final = 64
LEASE_S: Final = 60.0
"""Seconds after a run's last sign of life until what it opened is closed."""
_PROGRAM_BODY: Final = 256 * MIB
_LAYERS_BODY: Final = 2048 * MIB
_LAYERS_S: Final = 300.0
"""Seconds that a client of containers has to send a body."""
_MAX_WORD: Final = 128 * 1024
"""Bytes of one argument or variable, with its end; the kernel starts no program with a longer one."""
_MAX_WORDS: Final = 1024 * 1024
"""Bytes of all of them, with a pointer for each: half of what the kernel takes, for the sandbox adds words of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostOptions:
    """What a host gives."""

    maxima: Limits = MAX_LIMITS
    """The most that one program, session or environment may ask for."""
    max_sessions: int = MAX_SESSIONS
    """Sessions of the sandbox at a time."""
    idle_s: float = 600.0
    """Seconds without a call after which such a session ends."""
    max_open: int = 64
    """Environments at a time."""
    memory_mb: int = 0
    """For all environments together, in MiB."""
    share: float = 0.25
    """The part of its memory limit for which an environment counts: most use far less than they may."""
    lease_s: float = LEASE_S
    left_mb: int = 512
    """Memory of the machine that no environment is opened into, in MiB."""
    kept_mb: int = 512
    """Of snapshots that are kept, so that a run need not send them again."""
    headers_s: float = HEADERS_S
    """Seconds that a client has to send the headers of a request."""
    body_s: float = BODY_S
    """Seconds that a client has to send the body of a request; `_LAYERS_S` where there are containers."""


@dataclass(frozen=True, slots=True)
class _HeldSession:
    session: Session
    bench: str = ""
    """Whose container it is."""
    sockets: WaitingSockets | None = None


@dataclass(frozen=True, slots=True)
class _Bench:
    workbench: Workbench
    tasks: TaskGroup
    """In which its containers live."""
    client: str


@dataclass(frozen=True, slots=True, eq=False)
class _Promise:
    role: BenchRole
    memory_mb: float
    """For which it counts, in MiB."""


class SandboxHost:
    """Answers the requests of the protocol.

    Args:
        options: what it gives.
        tasks: in which what it opens lives.
        sandbox: runs programs; None: it runs none without a container.
        containers: makes environments; None: it gives none.
        images: the names of images that `containers` has.
    """

    def __init__(
        self,
        options: HostOptions,
        tasks: TaskGroup,
        *,
        sandbox: Sandbox | None = None,
        containers: Containers | None = None,
        images: tuple[str, ...] = (),
    ) -> None:
        self._options, self._sandbox, self._containers, self._images = options, sandbox, containers, images
        self._benches = Holding[_Bench](tasks)
        self._sessions, self._runs = Holding[_HeldSession](tasks), Holding[_HeldSession](tasks)
        self._promised: list[_Promise] = []
        """Of environments that are open, or are being opened."""
        self._instance = secrets.token_hex(8)
        self._kept = KeptBytes(options.kept_mb * MIB)

    def application(self, api_key: str | None, connections: Connections) -> web.Application:
        """Return the routes, behind the guard of `agentrl.servers.listening`."""
        layers = self._containers is not None
        check = guard(api_key, connections, turned_away_as_json, body_s=_LAYERS_S if layers else self._options.body_s)
        app = web.Application(
            middlewares=[refused_as_json, check], client_max_size=_LAYERS_BODY if layers else _PROGRAM_BODY
        )
        app.router.add_get("/state", self._state_asked)
        app.router.add_get("/sessions/{session}/port", self._port)
        app.router.add_delete("/sessions/{session}", self._end_session)
        app.router.add_delete("/benches/{bench}", self._close)
        posts = {
            "/state": self._sign_of_life,
            "/run": self._run,
            "/sessions": self._open_session,
            "/sessions/{session}": self._call,
            "/benches": self._open,
            "/benches/{bench}/add": self._add,
            "/benches/{bench}/keep": self._keep,
            "/benches/{bench}/changed": self._changed,
            "/benches/{bench}/read": self._read,
            "/benches/{bench}/snapshot": self._snapshot,
            "/benches/{bench}/restore": self._restore,
            "/benches/{bench}/sessions": self._start_container,
        }
        for path, handler in posts.items():
            app.router.add_post(path, handler)
        return app

    def state(self) -> HostState:
        """Return what there is room for."""
        options, sandbox, containers = self._options, self._sandbox, self._containers
        promised_mb = sum(promise.memory_mb for promise in self._promised)
        left = min(options.memory_mb - promised_mb, free_memory_mb() - options.left_mb)
        return HostState(
            name="" if (giving := sandbox or containers) is None else giving.name,
            is_isolated=sandbox is None or sandbox.is_isolated,
            instance=self._instance,
            max_sessions=0 if sandbox is None else options.max_sessions,
            free_mb=max(0, int(left)),
            share=options.share,
            num_open=len(self._benches),
            max_open=0 if containers is None else options.max_open,
            images=self._images,
            maxima=options.maxima.model_dump(),
            memory_mb=options.memory_mb,
            **self._roles()._asdict(),
        )

    def _roles(self) -> OpenRoles:
        roles = OpenRoles()
        for promise in self._promised:
            roles = roles.plus(promise.role, promise.memory_mb)
        return roles

    async def _state_asked(self, request: web.Request) -> web.Response:
        del request
        return encoded(self.state())

    async def _sign_of_life(self, request: web.Request) -> web.Response:
        body = await read_body(request, StateBody)
        self._benches.touch(lambda bench: bench.client == body.client)
        return encoded(self.state())

    async def _run(self, request: web.Request) -> web.Response:
        body = await read_body(request, ProgramBody)
        program = Program(argv=body.argv, files=body.files, stdin=body.stdin, environment=body.environment)
        _check_words(program)
        sandbox = self._own_sandbox()
        return encoded(await sandbox.run(program, self._limits_of(body.limits, sandbox.limits)))

    async def _open_session(self, request: web.Request) -> web.Response:
        most = self._options.max_sessions
        if len(self._sessions) >= most:
            return json_refusal(429, f"{most} sessions are open, the most of this host (--max-sessions); try again later")
        body, sandbox = await read_body(request, SessionBody), self._own_sandbox()
        limits = self._limits_of(body.limits, sandbox.limits)
        opened = sandbox.forks(limits=limits) if body.forks else sandbox.session(files=body.files, limits=limits)
        return encoded(Opened(name=await self._sessions.open(_held(opened), idle_s=self._options.idle_s)))

    async def _call(self, request: web.Request) -> web.Response:
        body = await read_body(request, CallBody)
        longest = self._options.maxima.wall_s + REPLY_GRACE_S
        if not 0 <= body.timeout_s <= longest:
            raise ConfigError(f"timeout_s: expected 0 to {longest:g}, the most of this host, got {body.timeout_s:g}")
        name = request.match_info["session"]
        with self._sessions.use(name) as own, self._runs.use(name) as run:
            held = own or run
            if held is None:
                return json_refusal(404, "there is no such session; it may have been idle for too long")
            supervisor = held.session.supervisor
            with self._benches.use(held.bench):
                answer = await supervisor.ask(bytes(body.request), body.timeout_s)
            if answer is None:
                return encoded(EndedBody(supervisor.ending), status=410)
        return web.Response(body=answer, content_type="application/json")

    async def _port(self, request: web.Request) -> web.StreamResponse:
        """Carry a connection of a container; a web socket that waits for one is no sign that its run lives."""
        run = self._runs.get(request.match_info["session"])
        if run is None or run.sockets is None:
            return json_refusal(404, "there is no such container with a port")
        return await run.sockets.carry(request)

    async def _end_session(self, request: web.Request) -> web.Response:
        name = request.match_info["session"]
        run = self._runs.get(name)
        if run is None and self._sessions.get(name) is None:
            # A host that started again has lost the container, and its files: to end it is no success.
            return json_refusal(404, "there is no such session; it may have been idle for too long")
        await self._sessions.close(name)
        with self._benches.use("" if run is None else run.bench):
            await self._runs.close(name)
        return encoded({})

    async def _open(self, request: web.Request) -> web.Response:
        body = await read_body(request, BenchBody)
        if self._containers is None:
            raise ConfigError("this host gives no containers; start it with `agentrl sandbox-host`")
        limits = self._limits_of(body.limits, CONTAINER_LIMITS)
        promise = _Promise(body.role, limits.memory_mb * self._options.share)
        if refusal := self._no_room(promise):
            return json_refusal(429, refusal)
        self._promised.append(promise)
        try:
            opened = self._bench(self._containers, body, limits, promise)
            name = await self._benches.open(opened, idle_s=self._options.lease_s)
        except BaseException:
            self._take_back(promise)  # its block may never have begun
            raise
        return encoded(Opened(name=name, state=self.state()))

    def _no_room(self, promise: _Promise) -> str | None:
        """Return why a further environment cannot be opened now; None: it can."""
        state, needed = self.state(), promise.memory_mb
        kept = self._roles().reserve_beside(promise.role, needed)
        beside = ", beside the room for second environments of episodes" if kept.places or kept.memory_mb else ""
        if state.num_open + kept.places >= state.max_open:
            return f"{state.num_open} of {state.max_open} environments are open (--max-open){beside}"
        if state.free_mb < needed + kept.memory_mb:
            return f"memory for a further environment: {state.free_mb} MiB, needed {needed:.0f} MiB{beside}"
        return None

    @asynccontextmanager
    async def _bench(
        self, containers: Containers, body: BenchBody, limits: Limits, promise: _Promise
    ) -> AsyncGenerator[_Bench]:
        try:
            async with containers.workbench(image=body.image, limits=limits) as workbench, task_group() as tasks:
                yield _Bench(workbench, tasks, body.client)
                tasks.cancel_scope.cancel()
        finally:
            self._take_back(promise)

    def _take_back(self, promise: _Promise) -> None:
        if promise in self._promised:
            self._promised.remove(promise)

    async def _close(self, request: web.Request) -> web.Response:
        await self._benches.close(request.match_info["bench"])
        return encoded(self.state())

    async def _add(self, request: web.Request) -> web.Response:
        body = await read_body(request, AddBody)
        with self._bench_of(request) as bench:
            await bench.workbench.add(body.files)
        return encoded({})

    async def _keep(self, request: web.Request) -> web.Response:
        body = await read_body(request, KeepBody)
        with self._bench_of(request) as bench:
            await bench.workbench.keep(body.paths, homes=body.homes)
        return encoded({})

    async def _changed(self, request: web.Request) -> web.Response:
        with self._bench_of(request) as bench:
            return encoded(await bench.workbench.changed())

    async def _read(self, request: web.Request) -> web.Response:
        body = await read_body(request, ReadBody)
        with self._bench_of(request) as bench:
            return encoded(await bench.workbench.read(body.path, max_bytes=body.max_bytes))

    async def _snapshot(self, request: web.Request) -> web.Response:
        with self._bench_of(request) as bench:
            content = await bench.workbench.snapshot()
        self._kept.keep(await digest_of(content), content)
        return encoded(content)

    async def _restore(self, request: web.Request) -> web.Response:
        body = await read_body(request, SnapshotBody)
        content = body.content or self._kept.get(body.digest)
        if content is None:
            return json_refusal(404, "this host has no such snapshot; send it")
        if body.content:
            self._kept.keep(await digest_of(content), content)
        with self._bench_of(request) as bench:
            await bench.workbench.restore(content)
        return encoded({})

    async def _start_container(self, request: web.Request) -> web.Response:
        body = await read_body(request, RunBody)
        limits = self._limits_of(body.limits, CONTAINER_LIMITS)
        with self._bench_of(request) as bench:
            opened = self._container(bench, request.match_info["bench"], body, limits)
            return encoded(Opened(name=await self._runs.open(opened, tasks=bench.tasks)))

    @asynccontextmanager
    async def _container(self, bench: _Bench, name: str, body: RunBody, limits: Limits) -> AsyncGenerator[_HeldSession]:
        sockets = None if body.port is None else WaitingSockets()
        way = None if body.port is None or sockets is None else Way(body.port, sockets.connect)
        run = bench.workbench.run(directory=body.directory, environment=body.environment, limits=limits, port=way)
        try:
            async with run as container:
                yield _HeldSession(container.session, name, sockets)
        finally:
            if sockets is not None:
                sockets.close()

    def _own_sandbox(self) -> Sandbox:
        if self._sandbox is None:
            raise ConfigError("this host runs no programs without a container")
        return self._sandbox

    @contextmanager
    def _bench_of(self, request: web.Request) -> Generator[_Bench]:
        with self._benches.use(request.match_info["bench"]) as bench:
            if bench is None:
                raise web.HTTPNotFound(reason="there is no such workbench; its run may have been silent for too long")
            yield bench

    def _limits_of(self, given: GivenLimits | None, own: Limits) -> Limits:
        """Return the limits that a caller asks for; for None its `own`, each no more than the host's maximum.

        Raises:
            ConfigError: one is over the host's maximum.
        """
        maxima = self._options.maxima
        if given is None:
            pairs = zip(own, dict(maxima).values(), strict=True)
            return Limits.model_validate({name: _smaller(value, most) for (name, value), most in pairs})
        limits = Limits.model_validate(given)
        if (over := exceeded(limits, maxima)) is not None:
            raise ConfigError(over)
        return limits


@asynccontextmanager
async def _held(opened: AbstractAsyncContextManager[Session]) -> AsyncGenerator[_HeldSession]:
    async with opened as session:
        yield _HeldSession(session)


def _check_words(program: Program) -> None:
    """Refuse a command that the kernel starts no program with.

    Raises:
        ConfigError: a word is too long, or all of them are.
    """
    words = [*program.argv, *(f"{name}={value}" for name, value in program.environment.items())]
    sizes = [len(word.encode(errors="surrogatepass")) + 1 for word in words]
    if max(sizes) > _MAX_WORD or sum(sizes) + 8 * len(sizes) > _MAX_WORDS:
        raise ConfigError(
            f"program: expected arguments and variables of at most {_MAX_WORD} bytes each and {_MAX_WORDS} together, got "
            f"{len(sizes)} of {sum(sizes)} bytes, the longest of {max(sizes)}; pass the data as a file or standard input"
        )


def _smaller(value: float | int | None, most: float | int | None) -> float | int | None:
    return value if value is None or most is None else min(value, most)


def free_memory_mb() -> int:
    """Return the memory that this process may still use, in MiB: of the machine, or of its control group if that is less."""
    lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    free = int(lines["MemAvailable"].split()[0]) // 1024
    with suppress(OSError, ValueError):  # no control group, or one without a limit
        group = Path("/sys/fs/cgroup")
        most, used = (int((group / name).read_text()) for name in ("memory.max", "memory.current"))
        free = min(free, (most - used) // MIB)
    return free


@asynccontextmanager
async def serving_host(
    options: HostOptions,
    *,
    sandbox: Sandbox | None = None,
    containers: Containers | None = None,
    images: tuple[str, ...] = (),
    host: str = "127.0.0.1",
    port: int = 0,
    api_key: str | None = None,
) -> AsyncGenerator[str]:
    """Serve runs inside the block, and yield the base URL. Needs the asyncio event loop.

    Args:
        options: what the host gives.
        sandbox: runs programs; None: it runs none without a container.
        containers: makes environments; None: it gives none.
        images: the names of images that `containers` has, which runs learn.
        host: address to listen on.
        port: 0 picks a free one.
        api_key: every request must carry it; None: none needs a key.

    Raises:
        ConfigError: for an address off loopback without a key, or one that cannot be bound.
    """
    connections = Connections(options.headers_s)
    async with task_group() as tasks:
        served = SandboxHost(options, tasks, sandbox=sandbox, containers=containers, images=images)
        app = served.application(api_key, connections)
        async with listening(app, connections, host=host, port=port, api_key=api_key) as url:
            try:
                yield url
            finally:
                tasks.cancel_scope.cancel()
