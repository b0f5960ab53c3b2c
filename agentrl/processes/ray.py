"""Starts processes on the nodes of a Ray cluster. The only module that imports Ray, and only when a run uses it.

Invariant: Ray places one small actor, an agent, for each process, and starts nothing else; the process runs in the
environment of its node and knows nothing of Ray. All agents of one `start` are in one placement group. A process ends with
its agent: its standard input closes. Only text, numbers and bytes go through Ray.

The calls of an agent that wait run on when the waiting task is cancelled. So each has a thread of its own there, and a call
that brings bytes can be repeated.
"""

from __future__ import annotations

import importlib.metadata
import logging
import os
import signal
import sys
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import anyio
import anyio.to_thread
from anyio.abc import TaskGroup

from agentrl.errors import ConfigError, LaunchError
from agentrl.processes.agent import HostedProcess, StreamName
from agentrl.processes.base import MAX_LINE, STOP_S, Exit, ProcessSpec, describe_code, open_log, read_tail, shorten_tail
from agentrl.processes.config import ClusterConfig
from agentrl.processes.machine import LOOPBACK
from agentrl.support.concurrency import task_group

logger = logging.getLogger(__name__)

OBJECT_STORE_BYTES = 80 << 20
"""Memory of the object store of a cluster that starts for a run; nothing is put into it."""
_CALLS = 16
"""Calls that an agent answers at the same time."""
_LAST_GASP_S = 1.0
"""Seconds by which an agent outlives a killed process, unless its node dies."""
_MARGIN_S = 1.5
"""Seconds that a call to an agent gets beyond what the agent itself may take."""


class ClusterResources(NamedTuple):
    """The resources of all nodes of a cluster, free or not."""

    cpus: int
    gpus: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentPlace:
    """The node of an agent: its address in the cluster, Ray's id, and its version of agentrl."""

    address: str
    node: str
    agentrl: str

    def __str__(self) -> str:
        return f"{self.address} ({self.node[:8]})"


class NodeAgent(HostedProcess):
    """The actor: a process on a node, and where that is."""

    def where(self) -> tuple[str, str, str]:
        """Return the address of the node, its id, and the version of agentrl there."""
        ray = import_ray()
        node: str = ray.get_runtime_context().get_node_id()
        return ray.util.get_node_ip_address(), node, importlib.metadata.version("agentrl")


class RayChild:
    """A process that an agent runs; a `Child`."""

    def __init__(self, spec: ProcessSpec, agent: Any, place: AgentPlace, *, host: str, port: int, pid: int) -> None:  # noqa: ANN401 - Ray's handle of an actor
        self.spec = spec
        self.host = host
        self.port = port
        self.place = place
        self.where = f"pid {pid} on node {place}"
        self._agent = agent
        self._killed = False
        self._exit: Exit | None = None
        self._has_ended = anyio.Event()
        self._released = anyio.Event()

    async def ended(self) -> Exit:
        await self._has_ended.wait()
        assert self._exit is not None
        return self._exit

    async def log_tail(self) -> str:
        """Return the last output of the process, or the end of the log where its agent is gone or gives no answer."""
        if self._exit is not None:
            return self._exit.log_tail
        with suppress(AgentLost), anyio.move_on_after(_MARGIN_S):
            return shorten_tail(await reply_of(self._agent.tail.remote()))
        return read_tail(self.spec.log_path)

    def kill(self) -> None:
        if self._exit is None:
            self._killed = True
            self._agent.signal.remote(signal.SIGKILL.value)

    async def stop(self) -> None:
        with anyio.CancelScope(shield=True), anyio.move_on_after(STOP_S + _MARGIN_S):
            if self._exit is None:
                self._killed = True
                with suppress(AgentLost):
                    await reply_of(self._agent.stop.remote())
                await self._has_ended.wait()
        self._released.set()

    async def lines(self) -> AsyncIterator[str]:
        async for line in self._lines("stdout"):
            yield line

    async def copy_stderr(self) -> None:
        """Append standard error to the log, and report its lines with rank and node, until it ends."""
        async for line in self._lines("stderr"):
            logger.info("%s on %s: %s", self.spec.name, self.place, line)

    async def watch(self) -> None:
        """Record how the process ends, and return."""
        try:
            code, tail = await reply_of(self._agent.wait.remote())
            if code == -signal.SIGKILL and not self._killed:
                await self._outlives()
        except AgentLost as lost:
            gone = lost.unreachable or await is_gone(self.place)
            reason = f"node {self.place} is gone" if gone else f"its agent on node {self.place} is gone ({lost})"
            self._exit = Exit(code=None, reason=reason, log_tail=read_tail(self.spec.log_path))
        else:
            self._exit = Exit(code=code, reason=f"{describe_code(code)} on node {self.place}", log_tail=shorten_tail(tail))
        self._has_ended.set()

    async def _outlives(self) -> None:
        """Return when the agent outlives its killed process by `_LAST_GASP_S`; raise `AgentLost` when it does not."""
        with anyio.move_on_after(_LAST_GASP_S):
            await reply_of(self._agent.until_released.remote())

    async def released(self) -> None:
        await self._released.wait()

    async def _lines(self, name: StreamName) -> AsyncIterator[str]:
        """Yield the lines of a stream until it ends or the node is gone; the log gets what is read at once, whole or not."""
        offset, rest = 0, b""
        with suppress(AgentLost):
            while data := await reply_of(self._agent.read.remote(name, offset)):
                offset += len(data)
                with self.spec.log_path.open("ab") as log:
                    log.write(data)
                *lines, rest = (rest + data).split(b"\n")
                rest = rest[-MAX_LINE:]
                for line in lines:
                    yield line.decode(errors="replace")


class RayLauncher:
    """Starts processes on the nodes of a Ray cluster; a `Launcher`. `open_ray` connects one."""

    elsewhere = True

    def __init__(self, tasks: TaskGroup, start_timeout_s: float) -> None:
        self._tasks = tasks
        self._start_timeout_s = start_timeout_s

    async def reserves_gpus(self) -> bool:
        found: dict[str, float] = await anyio.to_thread.run_sync(import_ray().cluster_resources)
        return found.get("GPU", 0) > 0

    async def start(self, specs: Sequence[ProcessSpec]) -> Sequence[RayChild]:
        """Start all of `specs` or none, on agents of one placement group, ranks sorted by node."""
        for spec in specs:
            open_log(spec.log_path).close()
        group = AgentGroup(specs)
        try:
            places = await group.placed(self._start_timeout_s)
            host_of = await reachable_hosts([place.address for place in places])
            children: list[RayChild] = []
            for spec, at in zip(specs, order_by_node(specs, places), strict=True):
                children.append(await _start_on(spec, group.agents[at], places[at], host_of[places[at].address]))
        except BaseException:
            group.release()
            raise
        for child in children:
            with child.spec.log_path.open("a") as log:
                log.write(f"{child.spec.name} starts on node {child.place}\n")
            self._tasks.start_soon(child.watch)
            self._tasks.start_soon(child.copy_stderr)
        self._tasks.start_soon(_release_after, group, children)
        return children


class AgentGroup:
    """Agents for some processes, in a placement group of Ray."""

    def __init__(self, specs: Sequence[ProcessSpec]) -> None:
        ray = import_ray()
        self._specs = specs
        spread = "STRICT_SPREAD" if any(spec.apart for spec in specs) else "PACK"
        self._group = ray.util.placement_group([_bundle(spec) for spec in specs], strategy=spread)
        strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
        self.agents: list[Any] = [
            ray.remote(NodeAgent)
            .options(
                num_cpus=spec.cpus,
                num_gpus=spec.gpus,
                max_restarts=0,
                max_concurrency=_CALLS,
                scheduling_strategy=strategy(placement_group=self._group, placement_group_bundle_index=index),
            )
            .remote()
            for index, spec in enumerate(specs)
        ]
        """Handle of the agent in each bundle."""

    async def placed(self, timeout_s: float) -> list[AgentPlace]:
        """Wait until every agent runs, and return where."""
        places: list[AgentPlace] = []
        try:
            with anyio.fail_after(timeout_s):
                for agent in self.agents:
                    address, node, version = await reply_of(agent.where.remote())
                    places.append(AgentPlace(address=address, node=node, agentrl=version))
        except TimeoutError:
            raise LaunchError(await anyio.to_thread.run_sync(self._lack, timeout_s)) from None
        except AgentLost as lost:
            raise LaunchError(
                f"the agent of {self._specs[len(places)].name} cannot start: {lost}. Each node needs the Python, the Ray "
                "and the agentrl of the driver, and the packages of agentrl[ray]"
            ) from None
        ours = importlib.metadata.version("agentrl")
        for place in places:
            if place.agentrl != ours:
                raise ConfigError(
                    f"node {place} has agentrl {place.agentrl}, the driver has {ours}; install the same version"
                )
        return places

    def release(self) -> None:
        """Kill the agents and give the room back; the processes end because their standard input closes."""
        ray = import_ray()
        if ray.is_initialized():
            for agent in self.agents:
                ray.kill(agent, no_restart=True)
            ray.util.remove_placement_group(self._group)

    def _lack(self, timeout_s: float) -> str:
        ray = import_ray()
        wanted = _sum(_bundle(spec) for spec in self._specs)
        free: Mapping[str, float] = ray.available_resources()
        alive = [node for node in ray.nodes() if node["Alive"]]
        names = ", ".join(spec.name for spec in self._specs)
        needs = ", ".join(f"{amount:g} {kind} ({free.get(kind, 0):g} free)" for kind, amount in wanted.items())
        has = ", ".join(f"{amount:g} {kind}" for kind, amount in _sum(_countable(node) for node in alive).items())
        return (
            f"Ray found no room for {names} within {timeout_s:g} s (cluster.start_timeout_s): they need {needs}; the "
            f"{len(alive)} nodes have {has} in all. Add nodes, end what uses them, or ask for less (trainer.parallel, "
            "inference.servers)"
        )


@asynccontextmanager
async def open_ray(config: ClusterConfig) -> AsyncGenerator[RayLauncher]:
    """Connect to the cluster of `config`, or start one on this machine for the run, and yield its launcher.

    A program that has connected to Ray already keeps its connection.

    Cancellation: the agents end, and with them their processes; a cluster that was started here ends.
    """
    ray = import_ray()
    connected_before: bool = ray.is_initialized()
    try:
        if not connected_before:
            await _connect(config)
        async with task_group() as tasks:
            yield RayLauncher(tasks, config.start_timeout_s)
            tasks.cancel_scope.cancel()
    finally:
        if not connected_before:
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(ray.shutdown)


def ray_resources(config: ClusterConfig) -> ClusterResources:
    """Return the resources of the cluster at `cluster.address`; connects to it where this program is not connected.

    Call it outside of an event loop, except where this program is connected.
    """
    return _counted() if import_ray().is_initialized() else anyio.run(_connect_and_count, config)


async def _connect_and_count(config: ClusterConfig) -> ClusterResources:
    async with open_ray(config):
        return _counted()


def _counted() -> ClusterResources:
    found: dict[str, float] = import_ray().cluster_resources()
    return ClusterResources(cpus=int(found.get("CPU", 0)), gpus=int(found.get("GPU", 0)))


def ray_address(config: ClusterConfig) -> str:
    """Return the address of the cluster: the config's, else $RAY_ADDRESS, else `local`, which starts one on this machine."""
    return config.address or os.environ.get("RAY_ADDRESS") or "local"


def import_ray() -> Any:  # noqa: ANN401 - a package that may be missing
    """Return the module `ray`."""
    try:
        import ray  # pyright: ignore[reportMissingImports]
        import ray.util.scheduling_strategies  # pyright: ignore[reportMissingImports, reportUnusedImport]
    except ImportError as error:
        raise ConfigError(
            f"cluster.launcher: ray needs a package that is missing ({error}); pip install 'agentrl[ray]'"
        ) from None
    return ray


class AgentLost(Exception):
    """An agent does not answer any more, because it, its node or its start failed."""

    def __init__(self, message: str, *, unreachable: bool) -> None:
        super().__init__(message)
        self.unreachable = unreachable


async def reply_of(reference: Any) -> Any:  # noqa: ANN401 - Ray's reference to a result
    """Wait for the result of a call to an agent; raises AgentLost."""
    errors = import_ray().exceptions
    try:
        return await reference
    except errors.RayError as error:
        lines = str(error).strip().splitlines()
        message = f"{type(error).__name__}: {lines[-1].strip() if lines else 'no message'}"
        raise AgentLost(message, unreachable=isinstance(error, errors.ActorUnavailableError)) from error


async def is_gone(place: AgentPlace) -> bool:
    """Return whether Ray has lost the node, which it may learn some seconds after its agents are out of reach."""
    nodes: list[dict[str, Any]] = await anyio.to_thread.run_sync(import_ray().nodes)
    return place.node not in {node["NodeID"] for node in nodes if node["Alive"]}


async def reachable_hosts(addresses: Sequence[str]) -> dict[str, str]:
    """Return the address of each node for others: loopback where the cluster is this machine alone."""
    ray = import_ray()

    def known() -> set[str]:
        nodes = {str(node["NodeManagerAddress"]) for node in ray.nodes() if node["Alive"]}
        return nodes | {str(ray.util.get_node_ip_address())}

    alone = len(await anyio.to_thread.run_sync(known)) == 1
    return {address: LOOPBACK if alone else address for address in addresses}


async def node_hosts() -> dict[str, str]:
    """Return, for each node by its name in messages, the address at which others reach processes there."""
    nodes: list[dict[str, Any]] = await anyio.to_thread.run_sync(import_ray().nodes)
    addresses = sorted({str(node["NodeManagerAddress"]) for node in nodes if node["Alive"]})
    return {f"node {address}": host for address, host in (await reachable_hosts(addresses)).items()}


async def num_nodes() -> int:
    """Return the number of nodes on which a process that takes a core can start."""
    nodes: list[dict[str, Any]] = await anyio.to_thread.run_sync(import_ray().nodes)
    return sum(bool(node["Alive"]) and node["Resources"].get("CPU", 0) >= 1 for node in nodes)


def order_by_node(specs: Sequence[ProcessSpec], places: Sequence[AgentPlace]) -> list[int]:
    """Return the place of each spec: specs of equal needs are together on a node, in order."""
    given: dict[int, int] = {}
    for needs in {(spec.cpus, spec.gpus) for spec in specs}:
        alike = [index for index, spec in enumerate(specs) if (spec.cpus, spec.gpus) == needs]
        by_node = sorted(alike, key=lambda index: (places[index].address, places[index].node, index))
        given |= dict(zip(alike, by_node, strict=True))
    return [given[index] for index in range(len(specs))]


async def _start_on(spec: ProcessSpec, agent: Any, place: AgentPlace, host: str) -> RayChild:  # noqa: ANN401 - Ray's handle of an actor
    first, *words = spec.command
    command = ["" if first == sys.executable else first, *words]
    call = partial(agent.start.remote, host=host, folder=os.getcwd(), merged=spec.role == "server")
    try:
        pid, port, problem = await reply_of(call(command, dict(spec.environment)))
    except AgentLost as lost:
        raise LaunchError(f"{spec.name} cannot be started on node {place}: {lost}") from None
    if problem:
        raise LaunchError(f"{spec.name} cannot be started on node {place}: {problem}; expected the same path on every node")
    return RayChild(spec, agent, place, host=host, port=port, pid=pid)


async def _release_after(group: AgentGroup, children: Sequence[RayChild]) -> None:
    try:
        for child in children:
            await child.released()
    finally:
        group.release()


async def _connect(config: ClusterConfig) -> None:
    ray, address = import_ray(), ray_address(config)
    if address.startswith("ray://"):
        raise ConfigError(f"cluster.address: {address} is for clients outside of a cluster; give HOST:PORT of its head")
    if address not in ("local", "auto"):
        await _check_answers(address, config.start_timeout_s)
    connect = partial(ray.init, address=address, log_to_driver=False, logging_level=logging.ERROR)
    try:
        if address == "local":
            _start_here(connect)
        else:
            # In a thread: it takes seconds, and in the main thread Ray would take over SIGTERM.
            with anyio.fail_after(config.start_timeout_s):
                await anyio.to_thread.run_sync(connect, abandon_on_cancel=True)
    except TimeoutError:
        raise ConfigError(
            f"cluster.address: Ray gave no answer at {address} within {config.start_timeout_s:g} s (cluster.start_timeout_s)"
        ) from None
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ConfigError(
            f"cluster.address: cannot join the Ray cluster at {address}: {error}; start one with `ray start --head`, or "
            "give the address that it prints"
        ) from error


def _start_here(connect: Callable[..., object]) -> None:
    """Start a cluster of this machine; in the main thread, where Ray takes over SIGTERM, its handler stays."""
    handler = signal.getsignal(signal.SIGTERM)
    try:
        connect(object_store_memory=OBJECT_STORE_BYTES, include_dashboard=False)
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)


async def _check_answers(address: str, timeout_s: float) -> None:
    """Raise where nothing listens: Ray would wait for minutes, in a thread that nothing can end."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise ConfigError(f"cluster.address: expected auto or HOST:PORT such as 10.0.0.1:6379, got {address}")
    try:
        with anyio.fail_after(timeout_s):
            stream = await anyio.connect_tcp(host.strip("[]"), int(port))
    except (OSError, TimeoutError) as error:
        raise ConfigError(
            f"cluster.address: no Ray cluster answers at {address} ({error or 'no answer'}); start one with `ray start "
            "--head`, or give the address that it prints"
        ) from None
    await stream.aclose()


def _bundle(spec: ProcessSpec) -> dict[str, float]:
    return {"CPU": float(spec.cpus)} | ({"GPU": float(spec.gpus)} if spec.gpus else {})


def _countable(node: Mapping[str, Any]) -> dict[str, float]:
    return {kind: node["Resources"].get(kind, 0) for kind in ("CPU", "GPU") if kind in node["Resources"]}


def _sum(amounts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    total: dict[str, float] = {}
    for each in amounts:
        for kind, amount in each.items():
            total[kind] = total.get(kind, 0) + amount
    return total
