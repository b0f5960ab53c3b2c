"""Hosts of containers on the nodes of a Ray cluster: one `agentrl sandbox-host` on each, which a run starts for itself.

Invariant: a host ends with the block that started it. One that ends before starts again where Ray finds room, at most
`RESTARTS` times an hour; until then its episodes run on the others.
"""

from __future__ import annotations

import logging
import secrets
import sys
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final, Protocol

import anyio
import msgspec

from agentrl.errors import AgentRLError, ConfigError, LaunchError
from agentrl.processes.base import (
    HOST_WORD,
    PORT_WORD,
    RESTART_WINDOW_S,
    RESTARTS,
    Child,
    Launcher,
    ProcessSpec,
    module_path,
)
from agentrl.processes.config import ClusterConfig
from agentrl.processes.ray import import_ray, num_nodes, open_ray, ray_address
from agentrl.support.concurrency import task_group
from agentrl_sandbox.containers.fleet.fleet import HostFleet
from agentrl_sandbox.containers.fleet.remote_host import RemoteHost

HOST_START_S: Final = 300.0
"""Seconds that a host has until it listens."""
_KEY: Final = "AGENTRL_HOSTS_KEY"
"""Environment variable of a host with the key of this run."""
logger = logging.getLogger(__name__)


class _Ready(msgspec.Struct):
    """The line that a host prints when it listens."""

    url: str


class ConnectToHosts(Protocol):
    """Connects to hosts, as `open_fleet` does once it has its other arguments."""

    def __call__(self, urls: Sequence[str], *, api_key: str | None) -> AbstractAsyncContextManager[HostFleet]: ...


@asynccontextmanager
async def open_ray_fleet(
    config: ClusterConfig, connect: ConnectToHosts, *, nodes: int | None = None, images: Mapping[str, str | None]
) -> AsyncGenerator[HostFleet]:
    """Start hosts on the nodes of a cluster and connect to them. Needs the asyncio event loop.

    Args:
        config: names the cluster; without an address it is the one that this process has joined.
        connect: gets the addresses of the hosts and their key.
        nodes: how many nodes get a host; None: all that are there.
        images: as the run file names them; a folder lies at the same path on each node.

    Raises:
        ConfigError: there is no cluster, or `connect` refuses the hosts.
        LaunchError: the nodes have no room, or a host does not start; the message has the end of its log.

    Cancellation: the hosts end, and with them their containers.
    """
    if ray_address(config) == "local" and not import_ray().is_initialized():
        raise ConfigError(
            "containers.address: this process has joined no Ray cluster; give the address of its head, such as "
            "10.0.0.1:6379, or set RAY_ADDRESS"
        )
    key = secrets.token_urlsafe(32)
    with TemporaryDirectory(prefix="agentrl-hosts-") as logs:
        async with open_ray(config) as launcher:
            count = await num_nodes() if nodes is None else nodes
            specs = [_host_spec(index, key, images, Path(logs)) for index in range(count)]
            children: list[Child] = [*await launcher.start(specs)]
            try:
                urls = [await _address(child) for child in children]
                async with connect(urls, api_key=key) as opened, task_group() as tasks:
                    for index in range(count):
                        tasks.start_soon(_keep_running, launcher, children, index, opened.hosts[index])
                    yield opened
                    tasks.cancel_scope.cancel()
            finally:
                with anyio.CancelScope(shield=True):
                    async with task_group() as ending:
                        for child in children:
                            ending.start_soon(child.stop)


def _host_spec(index: int, key: str, images: Mapping[str, str | None], logs: Path) -> ProcessSpec:
    given = [word for name, folder in images.items() if folder is not None for word in ("--image", f"{name}={folder}")]
    listening = ("--host", HOST_WORD, "--port", PORT_WORD, "--api-key-env", _KEY)
    return ProcessSpec(
        name=f"sandbox host {index}",
        role="host",
        command=(sys.executable, "-P", "-m", "agentrl", "sandbox-host", *listening, *given),
        environment={"PYTHONPATH": module_path(), _KEY: key},
        log_path=logs / f"host-{index}.log",
        apart=True,
    )


async def _address(child: Child) -> str:
    """Return the address of a host once it listens."""
    with anyio.move_on_after(HOST_START_S):
        async for line in child.lines():
            return msgspec.json.decode(line, type=_Ready).url
        end = await child.ended()
        raise LaunchError(f"{child.spec.name} ({child.where}) ended with {end.reason}; its log ends with:\n{end.log_tail}")
    raise LaunchError(
        f"{child.spec.name} ({child.where}) does not listen after {HOST_START_S:g} s; its log ends with:\n"
        f"{await child.log_tail()}"
    )


async def _keep_running(launcher: Launcher, children: list[Child], index: int, host: RemoteHost) -> None:
    """Start a host again whenever it has ended, until cancelled."""
    ends: list[float] = []
    while True:
        end = await children[index].ended()
        now, spec = anyio.current_time(), children[index].spec
        ends = [*(at for at in ends if now - at < RESTART_WINDOW_S), now]
        said = f"{spec.name} ({children[index].where}) ended with {end.reason}; its log ends with:\n{end.log_tail}"
        if len(ends) > RESTARTS:
            logger.error("%s\nIt has ended %d times within an hour and stays away; others do its work", said, len(ends))
            return
        logger.warning("%s\nIts episodes run again on other hosts, and it starts again", said)
        await children[index].stop()
        try:
            [children[index]] = await launcher.start([spec])
            host.move(await _address(children[index]))
        except AgentRLError as error:
            logger.error("%s does not start again and stays away; others do its work: %s", spec.name, error)
            return
