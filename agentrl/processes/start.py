"""Starts children and links them to this process: over their standard streams, or over TCP, where they join a meeting.

Invariant: no child outlives the block that started it, on whichever machine it runs. Its link closes first; it then has
`leave_s` seconds to end by itself. What a scheduler started ends with its connection, and is the scheduler's to start again.
"""

from __future__ import annotations

import logging
import os
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import zip_longest

import anyio

from agentrl.processes.base import TOKEN_VARIABLE, Child, Launcher, LocalLauncher, ProcessSpec
from agentrl.processes.config import ClusterConfig, listen_address
from agentrl.processes.handshake import checked_token, new_token
from agentrl.processes.link import Link
from agentrl.processes.meeting import Meeting, check_reachable, open_meeting
from agentrl.processes.ray import open_ray
from agentrl.support.concurrency import task_group

logger = logging.getLogger(__name__)


@asynccontextmanager
async def open_launcher(config: ClusterConfig) -> AsyncGenerator[Launcher]:
    """Yield the launcher of `config`; under `attach`, only the trainer ranks come from other machines."""
    if config.launcher == "ray":
        async with open_ray(config) as launcher:
            yield launcher
    else:
        yield LocalLauncher()


@asynccontextmanager
async def local_links(specs: Sequence[ProcessSpec], *, leave_s: float = 0.0) -> AsyncGenerator[Sequence[Link]]:
    """Yield a link to each of `specs`, which are processes of this machine."""
    children = await LocalLauncher().start(specs)
    async with _ending(children, leave_s):
        links = [Link.piped(child) for child in children]
        try:
            yield links
        finally:
            if leave_s:
                with anyio.CancelScope(shield=True):
                    for link in links:
                        await link.hang_up()


@asynccontextmanager
async def launched_links(
    launcher: Launcher,
    config: ClusterConfig,
    specs: Sequence[ProcessSpec],
    *,
    names: str,
    port: int | None = None,
    leave_s: float = 0.0,
) -> AsyncGenerator[Sequence[Link]]:
    """Start `specs` through `launcher`, and yield a link to each once all have joined at `cluster.listen`.

    `--attach HOST:PORT` is added to each command, and a fresh token to its environment. `port` replaces that of
    `cluster.listen`, 0: a free one. `leave_s` are the seconds that a child gets to end by itself after its connection.

    Raises:
        LaunchError: a child cannot be started, ended before it joined, or has not joined within `cluster.start_timeout_s`.
    """
    host, listen_port = listen_address(config)
    token = new_token()
    async with open_meeting((host, listen_port if port is None else port), len(specs), token, names) as meeting:
        # The address is known only now, since the port may be a free one.
        joining = ("--attach", host_and_port(meeting.address))
        children = await launcher.start(
            [
                replace(spec, command=spec.command + joining, environment={**spec.environment, TOKEN_VARIABLE: token})
                for spec in specs
            ]
        )
        async with _ending(children, leave_s):
            check_reachable(config, {child.spec.name: child.host for child in children})
            async with _members(meeting, children, config) as links:
                yield links


@asynccontextmanager
async def attached_links(config: ClusterConfig, count: int) -> AsyncGenerator[Sequence[Link]]:
    """Wait for `count` children that a scheduler starts, and yield a link to each."""
    token = checked_token(os.environ.get(TOKEN_VARIABLE), TOKEN_VARIABLE)
    async with open_meeting(listen_address(config), count, token) as meeting:
        logger.warning(
            "waiting for %d trainer rank(s) to join at %s:%d: Slurm, Kubernetes or torchrun starts them, also again after a "
            "failure (cluster.launcher: attach)",
            count,
            *meeting.address,
        )
        async with _members(meeting, (), config) as links:
            yield links


def host_and_port(address: tuple[str, int]) -> str:
    """Return an address as one word."""
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


@asynccontextmanager
async def _members(meeting: Meeting, children: Sequence[Child], config: ClusterConfig) -> AsyncGenerator[Sequence[Link]]:
    members = await meeting.gather(config.start_timeout_s, children)
    links = [Link.joined(member, child) for member, child in zip_longest(members, children)]
    async with task_group() as watching:
        for link in links:
            watching.start_soon(link.shut_with_process)
        try:
            yield links
        finally:
            for link in links:
                link.shut()
            watching.cancel_scope.cancel()


@asynccontextmanager
async def _ending(children: Sequence[Child], leave_s: float) -> AsyncGenerator[None]:
    try:
        yield
    finally:
        with anyio.CancelScope(shield=True):
            async with task_group() as ending:
                for child in children:
                    ending.start_soon(_end, child, leave_s)


async def _end(child: Child, leave_s: float) -> None:
    with anyio.move_on_after(leave_s):
        await child.ended()
    child.kill()  # and with it the programs that it started
    await child.stop()
