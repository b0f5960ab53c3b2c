"""A server that gives containers to runs on other machines. `agentrl sandbox-host` runs one.

The protocol is in `agentrl_sandbox.containers.fleet.host_wire`. Invariant: the server listens off loopback only with a key,
which every route asks for. It opens no environment that it has no room for, and none gets more than the server gives. What
a run opened is closed when the run asks, and `LEASE_S` after its last sign of life.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator, Generator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from aiohttp import web
from aiohttp.typedefs import Handler
from anyio.abc import TaskGroup

from agentrl.errors import ConfigError
from agentrl.servers.listening import Connections, guard, listening
from agentrl.support.concurrency import task_group
from agentrl_sandbox.containers import Container, Containers, Workbench
from agentrl_sandbox.containers.fleet.host_wire import (
    AddBody,
    BenchBody,
    Content,
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
from agentrl_sandbox.containers.kept_bytes import KeptBytes
from agentrl_sandbox.containers.protocol import FileContents
from agentrl_sandbox.hosts.holding import Holding
from agentrl_sandbox.hosts.json_answers import encoded, json_refusal, read_body, refused_as_json, turned_away_as_json
from agentrl_sandbox.hosts.port_carrier import PortCarrier, open_carrier
from agentrl_sandbox.remote import CallBody, exceeded
from agentrl_sandbox.session import REPLY_GRACE_S
from agentrl_sandbox.types import MIB, Limits

LEASE_S: Final = 60.0
"""Seconds after a run's last sign of life until what it opened is closed."""
_MAX_BODY: Final = 2048 * MIB
_BODY_S: Final = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class HostOptions:
    """What a host gives."""

    max_open: int
    """Environments at a time."""
    memory_mb: int
    """For all environments together, in MiB."""
    share: float
    """The part of its memory limit for which an environment counts: most use far less than they may."""
    maxima: Limits
    """The most that one environment may ask for."""
    lease_s: float = LEASE_S
    left_mb: int = 512
    """Memory of the machine that no environment is opened into, in MiB."""
    kept_mb: int = 512
    """Of snapshots that are kept, so that a run need not send them again."""


@dataclass(frozen=True, slots=True)
class _HeldRun:
    container: Container
    carrier: PortCarrier | None


@dataclass(frozen=True, slots=True)
class _Bench:
    workbench: Workbench
    runs: Holding[_HeldRun]
    client: str


class ContainerHost:
    """Answers the requests of the protocol."""

    def __init__(self, containers: Containers, images: tuple[str, ...], options: HostOptions, tasks: TaskGroup) -> None:
        self._containers, self._images, self._options = containers, images, options
        self._benches = Holding[_Bench](tasks, idle_s=options.lease_s)
        self._promised_mb = 0.0
        self._instance = secrets.token_hex(8)
        self._kept = KeptBytes(options.kept_mb * MIB)

    def application(self, api_key: str | None, connections: Connections) -> web.Application:
        """Return the routes, behind the guard of `agentrl.servers.listening`."""
        check = guard(api_key, connections, turned_away_as_json, body_s=_BODY_S)
        app = web.Application(middlewares=[refused_as_json, _file_errors_as_json, check], client_max_size=_MAX_BODY)
        post, bench = app.router.add_post, "/benches/{bench}"
        post("/state", self._state_asked)
        post("/benches", self._open)
        app.router.add_delete(bench, self._close)
        for name, handler in (("add", self._add), ("keep", self._keep), ("changed", self._changed), ("read", self._read)):
            post(f"{bench}/{name}", handler)
        post(f"{bench}/snapshot", self._snapshot)
        post(f"{bench}/restore", self._restore)
        post(f"{bench}/runs", self._run)
        post(f"{bench}/runs/{{run}}", self._call)
        app.router.add_delete(f"{bench}/runs/{{run}}", self._end_run)
        app.router.add_get(f"{bench}/runs/{{run}}/port", self._port)
        return app

    def state(self) -> HostState:
        """Return what there is room for."""
        options = self._options
        left = min(options.memory_mb - self._promised_mb, free_memory_mb() - options.left_mb)
        return HostState(
            name=self._containers.name,
            instance=self._instance,
            free_mb=max(0, int(left)),
            share=options.share,
            num_open=len(self._benches),
            max_open=options.max_open,
            images=self._images,
            maxima=options.maxima.model_dump(),
        )

    async def _state_asked(self, request: web.Request) -> web.Response:
        body = await read_body(request, StateBody)
        self._benches.touch(lambda bench: bench.client == body.client)
        return encoded(self.state())

    async def _open(self, request: web.Request) -> web.Response:
        body = await read_body(request, BenchBody)
        limits = self._limits_of(body.limits)
        state, needed = self.state(), limits.memory_mb * self._options.share
        if state.num_open >= state.max_open:
            return json_refusal(429, f"{state.max_open} environments are open, the most of this host (--max-open)")
        if state.free_mb < needed:
            return json_refusal(429, f"memory for a further environment: {state.free_mb} MiB, needed {needed:.0f} MiB")
        name = await self._benches.open(self._bench(body, limits, needed))
        return encoded(Opened(name=name, state=self.state()))

    @asynccontextmanager
    async def _bench(self, body: BenchBody, limits: Limits, needed_mb: float) -> AsyncGenerator[_Bench]:
        self._promised_mb += needed_mb
        try:
            async with self._containers.workbench(image=body.image, limits=limits) as workbench, task_group() as tasks:
                yield _Bench(workbench, Holding[_HeldRun](tasks), body.client)
                tasks.cancel_scope.cancel()
        finally:
            self._promised_mb -= needed_mb

    async def _close(self, request: web.Request) -> web.Response:
        await self._benches.close(request.match_info["bench"])
        return encoded(self.state())

    async def _add(self, request: web.Request) -> web.Response:
        body = await read_body(request, AddBody)
        with self._bench_of(request) as bench:
            await bench.workbench.add({name: FileContents(file.content, file.can_run) for name, file in body.files.items()})
        return encoded({})

    async def _keep(self, request: web.Request) -> web.Response:
        body = await read_body(request, KeepBody)
        with self._bench_of(request) as bench:
            await bench.workbench.keep(body.paths, homes=body.homes)
        return encoded({})

    async def _changed(self, request: web.Request) -> web.Response:
        with self._bench_of(request) as bench:
            return encoded(Names(names=await bench.workbench.changed()))

    async def _read(self, request: web.Request) -> web.Response:
        body = await read_body(request, ReadBody)
        with self._bench_of(request) as bench:
            return encoded(Content(content=await bench.workbench.read(body.path, max_bytes=body.max_bytes)))

    async def _snapshot(self, request: web.Request) -> web.Response:
        with self._bench_of(request) as bench:
            content = await bench.workbench.snapshot()
        self._kept.keep(await digest_of(content), content)
        return encoded(SnapshotBody(content=content))

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

    async def _run(self, request: web.Request) -> web.Response:
        body = await read_body(request, RunBody)
        limits = self._limits_of(body.limits)
        with self._bench_of(request) as bench:
            return encoded(Opened(name=await bench.runs.open(self._container(bench, body, limits))))

    @asynccontextmanager
    async def _container(self, bench: _Bench, body: RunBody, limits: Limits) -> AsyncGenerator[_HeldRun]:
        async with AsyncExitStack() as stack:
            carrier = None if body.port is None else await stack.enter_async_context(open_carrier())
            way = None if body.port is None or carrier is None else (body.port, carrier.port)
            run = bench.workbench.run(directory=body.directory, environment=body.environment, limits=limits, port=way)
            async with run as container:
                yield _HeldRun(container, carrier)

    async def _port(self, request: web.Request) -> web.StreamResponse:
        """Carry a connection of a container; one that waits for it is no sign that its run lives."""
        bench = self._benches.get(request.match_info["bench"])
        run = None if bench is None else bench.runs.get(request.match_info["run"])
        if run is None or run.carrier is None:
            return json_refusal(404, "there is no such container with a port")
        return await run.carrier.carry(request)

    async def _call(self, request: web.Request) -> web.Response:
        body = await read_body(request, CallBody)
        longest = self._options.maxima.wall_s + REPLY_GRACE_S
        if not 0 <= body.timeout_s <= longest:
            raise ConfigError(f"timeout_s: expected 0 to {longest:g}, the most of this host, got {body.timeout_s:g}")
        with self._bench_of(request) as bench, bench.runs.use(request.match_info["run"]) as run:
            if run is None:
                return json_refusal(404, "there is no such container")
            supervisor = run.container.session.supervisor
            answer = await supervisor.ask(bytes(body.request), body.timeout_s)
            if answer is None:
                return web.json_response({"ended": supervisor.ending}, status=410)
        return web.Response(body=answer, content_type="application/json")

    async def _end_run(self, request: web.Request) -> web.Response:
        with self._bench_of(request) as bench:
            await bench.runs.close(request.match_info["run"])
        return encoded({})

    @contextmanager
    def _bench_of(self, request: web.Request) -> Generator[_Bench]:
        with self._benches.use(request.match_info["bench"]) as bench:
            if bench is None:
                raise web.HTTPNotFound(reason="there is no such workbench; its run may have been silent for too long")
            yield bench

    def _limits_of(self, given: dict[str, float | int | None]) -> Limits:
        limits = Limits.model_validate(given)
        if (over := exceeded(limits, self._options.maxima, host_option)) is not None:
            raise ConfigError(over)
        return limits


@web.middleware
async def _file_errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except OSError as error:
        body = FileError(number=error.errno or 0, error=error.strerror or str(error), path=str(error.filename or ""))
        answer = encoded(body)
        answer.set_status(422)
        return answer


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
async def serving_containers(
    containers: Containers,
    options: HostOptions,
    *,
    images: tuple[str, ...] = (),
    host: str = "127.0.0.1",
    port: int = 0,
    api_key: str | None = None,
) -> AsyncGenerator[str]:
    """Give containers to runs inside the block, and yield the base URL. Needs the asyncio event loop.

    Args:
        containers: makes them.
        options: what the host gives.
        images: the names of images that it has, which runs learn.
        host: address to listen on.
        port: 0 picks a free one.
        api_key: every request must carry it; None: none needs a key.

    Raises:
        ConfigError: for an address off loopback without a key, or one that cannot be bound.
    """
    connections = Connections()
    async with task_group() as tasks:
        app = ContainerHost(containers, images, options, tasks).application(api_key, connections)
        async with listening(app, connections, host=host, port=port, api_key=api_key) as url:
            try:
                yield url
            finally:
                tasks.cancel_scope.cancel()
