"""Where workers start: as processes of this machine, or on the nodes of a Ray cluster.

Invariant: each worker ends with the block that started it, on whichever node it runs.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TypeAlias

import anyio
from anyio.abc import ByteStream

from agentrl.cluster.base import Launcher, ProcessSpec
from agentrl.cluster.config import ClusterConfig, listen_address
from agentrl.cluster.ray import open_ray
from agentrl.concurrency import task_group
from agentrl.errors import RolloutWorkerDied
from agentrl.rollout.remote.join_point import WORKER_TOKEN_VARIABLE, JoinPoint
from agentrl.rollout.remote.wire import StartWorker, StreamWire, Wire, local_worker, module_path

LEAVE_S = 2.0
"""Seconds that a worker gets to end by itself before its node stops it."""
JOIN_S = 120.0
"""Seconds that a worker gets to join the driver after its process has started."""
_END_S = 2.0
"""Seconds that a worker has to end after its connection."""
OpenNodes: TypeAlias = Callable[[], AbstractAsyncContextManager[StartWorker]]
"""Connects to the nodes, and yields what starts a worker there."""


@asynccontextmanager
async def this_machine() -> AsyncGenerator[StartWorker]:
    """Yield what starts workers as processes of this machine."""
    yield local_worker


@asynccontextmanager
async def ray_nodes(config: ClusterConfig) -> AsyncGenerator[StartWorker]:
    """Yield what starts workers on the nodes of a Ray cluster; they join the driver at the host of `cluster.listen`.

    Raises:
        ConfigError: Ray is not installed, there is no cluster, or this machine does not have the address.

    Cancellation: the workers end.
    """
    async with open_ray(config) as launcher, JoinPoint.listening(listen_address(config)[0]) as point:
        yield partial(launched_worker, launcher, point)


@asynccontextmanager
async def launched_worker(launcher: Launcher, point: JoinPoint, name: str, log_path: Path) -> AsyncGenerator[Wire]:
    """Yield a worker that `launcher` starts and that joins at `point`.

    Raises:
        ConfigError, LaunchError: it cannot be started.
        RolloutWorkerDied: it ended before it joined, or did not join in time.

    Cancellation: it ends.
    """
    token = point.expect()
    address = f"[{point.host}]:{point.port}" if ":" in point.host else f"{point.host}:{point.port}"
    spec = ProcessSpec(
        name=name,
        role="rollout",
        command=(sys.executable, "-P", "-m", "agentrl.rollout.remote.process", f"--join={address}"),
        environment={"PYTHONPATH": module_path(), WORKER_TOKEN_VARIABLE: token},
        log_path=log_path,
    )
    [child] = await launcher.start([spec])

    async def obituary() -> str:
        with anyio.move_on_after(_END_S):
            ended = await child.ended()
            return f"{ended.reason}; the end of {log_path}:\n{ended.log_tail}"
        return f"its connection is closed, but it still runs; the end of {log_path}:\n{await child.log_tail()}"

    async def fail_when_ended() -> None:
        ended = await child.ended()
        raise RolloutWorkerDied(f"{name} ended before it joined the driver: {ended.reason}; its log:\n{ended.log_tail}")

    stream: ByteStream | None = None
    try:
        async with task_group() as waiting:
            waiting.start_soon(fail_when_ended)
            with anyio.move_on_after(JOIN_S) as deadline:
                stream = await point.joined(token)
            waiting.cancel_scope.cancel()
        if deadline.cancelled_caught or stream is None:
            raise RolloutWorkerDied(
                f"{name} has not joined the driver at {address} within {JOIN_S:g} s; its node must reach that address "
                f"(cluster.listen). Its log:\n{await child.log_tail()}"
            )
        async with stream:
            yield StreamWire(stream, obituary)
    finally:
        with anyio.CancelScope(shield=True):
            with anyio.move_on_after(LEAVE_S):  # it ends by itself, because its connection is closed
                await child.ended()
            await child.stop()
