"""Starts rollout workers: as processes of this machine, or on the nodes of a Ray cluster, where each joins over TCP.

Invariant: each worker ends with the block that started it. The limit within which it ends by itself is the one that it was
started with, so that nothing stops it before.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TypeAlias

from agentrl.processes.base import Launcher, ProcessSpec, module_path
from agentrl.processes.config import ClusterConfig
from agentrl.processes.link import Link
from agentrl.processes.meeting import check_reachable
from agentrl.processes.ray import node_hosts, open_ray
from agentrl.processes.start import launched_links, local_links

LEAVE_S = 3.0
"""Seconds that episodes and the workflow get to end after the driver has left; then the worker ends itself."""
_EXIT_S = 1.0
"""Seconds that its process gets for that end."""
StartWorker: TypeAlias = Callable[[str, Path], AbstractAsyncContextManager[Link]]
"""Starts the worker of a name, which logs to a file; it ends with the block."""
OpenNodes: TypeAlias = Callable[[], AbstractAsyncContextManager[StartWorker]]


@asynccontextmanager
async def this_machine() -> AsyncGenerator[StartWorker]:
    """Yield what starts workers as processes of this machine."""
    yield _local_worker


@asynccontextmanager
async def ray_nodes(config: ClusterConfig) -> AsyncGenerator[StartWorker]:
    """Yield what starts workers on the nodes of a Ray cluster; they join the driver at the host of `cluster.listen`."""
    async with open_ray(config) as launcher:
        check_reachable(config, await node_hosts())
        yield partial(launched_worker, launcher, config)


@asynccontextmanager
async def launched_worker(
    launcher: Launcher, config: ClusterConfig, name: str, log_path: Path, *, leave_s: float = LEAVE_S
) -> AsyncGenerator[Link]:
    """Yield a worker that `launcher` starts and that joins at the host of `cluster.listen`, on a port of its own."""
    spec = _worker_spec(name, log_path, leave_s)
    async with launched_links(launcher, config, [spec], names=name, port=0, leave_s=leave_s + _EXIT_S) as [link]:
        yield link


@asynccontextmanager
async def _local_worker(name: str, log_path: Path) -> AsyncGenerator[Link]:
    async with local_links([_worker_spec(name, log_path, LEAVE_S)], leave_s=LEAVE_S + _EXIT_S) as [link]:
        yield link


def _worker_spec(name: str, log_path: Path, leave_s: float) -> ProcessSpec:
    return ProcessSpec(
        name=name,
        role="rollout",
        command=(sys.executable, "-P", "-m", "agentrl.rollout.remote.process", f"--leave={leave_s}"),
        environment={"PYTHONPATH": module_path()},
        log_path=log_path,
    )
