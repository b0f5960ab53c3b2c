"""Where workers start: as processes of this machine, or on the nodes of a Ray cluster.

Invariant: each worker ends with the block that started it, on whichever node it runs. A worker of a cluster joins the driver
as a trainer rank does (`agentrl.processes.meeting`), with a token of its own.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TypeAlias

import anyio

from agentrl.concurrency import task_group
from agentrl.processes.base import TOKEN_VARIABLE, Child, Launcher, ProcessSpec
from agentrl.processes.config import ClusterConfig, listen_address
from agentrl.processes.handshake import new_token
from agentrl.processes.meeting import Attendee, check_reachable, open_meeting
from agentrl.processes.ray import node_hosts, open_ray
from agentrl.rollout.remote.wire import StartWorker, StreamWire, Wire, local_worker, module_path

LEAVE_S = 2.0
"""Seconds that a worker gets to end by itself before its node stops it."""
_LAST_WORDS_S = 0.5
"""Seconds after the end of a process in which its last messages may arrive."""
_END_S = 10.0
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
        ConfigError: Ray is not installed, there is no cluster, or a node cannot reach the driver at that host.

    Cancellation: the workers end.
    """
    async with open_ray(config) as launcher:
        check_reachable(config, await node_hosts())
        yield partial(launched_worker, launcher, config)


@asynccontextmanager
async def launched_worker(launcher: Launcher, config: ClusterConfig, name: str, log_path: Path) -> AsyncGenerator[Wire]:
    """Yield a worker that `launcher` starts and that joins at the host of `cluster.listen`, on a port of its own.

    Raises:
        ConfigError: this machine does not have the address, or the cluster can never place the worker.
        LaunchError: it cannot be started, ended before it joined, or has not joined within `cluster.start_timeout_s`.

    Cancellation: it ends.
    """
    token = new_token()
    async with open_meeting((listen_address(config)[0], 0), 1, token, name) as meeting:
        host, port = meeting.address
        spec = ProcessSpec(
            name=name,
            role="rollout",
            command=(
                sys.executable,
                "-P",
                "-m",
                "agentrl.rollout.remote.process",
                f"--join=[{host}]:{port}" if ":" in host else f"--join={host}:{port}",
            ),
            environment={"PYTHONPATH": module_path(), TOKEN_VARIABLE: token},
            log_path=log_path,
        )
        [child] = await launcher.start([spec])
        try:
            [member] = await meeting.gather(config.start_timeout_s, [child])
            async with _watched(member, child) as wire:
                yield wire
        finally:
            with anyio.CancelScope(shield=True):
                with anyio.move_on_after(LEAVE_S):  # it ends by itself, because its connection is closed
                    await child.ended()
                await child.stop()


@asynccontextmanager
async def _watched(member: Attendee, child: Child) -> AsyncGenerator[StreamWire]:
    """Yield the connection with a worker; it ends with the process, also where its machine cannot close it any more."""

    async def obituary() -> str:
        with anyio.move_on_after(_END_S):
            ended = await child.ended()
            return f"{ended.reason}; the end of {child.spec.log_path}:\n{ended.log_tail}"
        return f"its connection is closed, but it still runs; the end of its log:\n{await child.log_tail()}"

    wire = StreamWire(member.stream, obituary)

    async def end_with_process() -> None:
        await child.ended()
        with anyio.move_on_after(_LAST_WORDS_S):
            await wire.ended.wait()
        member.shut()

    async with task_group() as watching:
        watching.start_soon(end_with_process)
        try:
            yield wire
        finally:
            member.shut()
            watching.cancel_scope.cancel()
