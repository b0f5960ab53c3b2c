"""Hosts of containers for tests: processes of this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, contextmanager
from typing import Any, cast

from agentrl_sandbox.base import Sandbox
from agentrl_sandbox.containers import Containers
from agentrl_sandbox.containers.fleet.fleet import HostFleet, open_fleet
from agentrl_sandbox.containers.protocol import CONTAINER_LIMITS
from agentrl_sandbox.hosts.server import MAX_LIMITS, HostOptions, serving_host
from agentrl_sandbox.types import Limits

HOST_KEY = "a key for hosts"
PLANNED_LIMITS = CONTAINER_LIMITS.model_copy(update={"memory_mb": 256, "wall_s": 300.0})


@contextmanager
def running_host(*options: str) -> Generator[tuple[str, subprocess.Popen[bytes]]]:
    """Yield the address of a host, and its process, which the block's end kills."""
    command = [sys.executable, "-m", "agentrl", "sandbox-host", "--port", "0", "--api-key-env", "HOST_KEY", *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, "HOST_KEY": HOST_KEY})
    try:
        assert process.stdout is not None
        yield json.loads(process.stdout.readline())["url"], process
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def serving_sandbox(
    sandbox: Sandbox,
    *,
    host: str = "127.0.0.1",
    api_key: str | None = None,
    **options: Any,  # noqa: ANN401
) -> AbstractAsyncContextManager[str]:
    """Serve a sandbox by a host without containers that has these options."""
    return serving_host(HostOptions(**options), sandbox=sandbox, host=host, api_key=api_key)


class PlannedContainers:
    """Environments that are a plan: they hold no process, so that a thousand of them fit on any machine."""

    name = "planned"

    @asynccontextmanager
    async def workbench(self, *, image: str | None = None, limits: Limits | None = None) -> AsyncGenerator[Any]:
        del image, limits
        yield None


@asynccontextmanager
async def planned_fleet(
    *hosts: HostOptions, images: Sequence[tuple[str, ...]], wanted: Mapping[str, str | None], max_open: int = 64
) -> AsyncGenerator[HostFleet]:
    """A fleet of hosts with these images, whose environments are plans."""
    async with AsyncExitStack() as stack:
        containers = cast("Containers", PlannedContainers())
        serving = [serving_host(one, containers=containers, images=names) for one, names in zip(hosts, images, strict=True)]
        urls = [await stack.enter_async_context(each) for each in serving]
        yield await stack.enter_async_context(open_fleet(urls, images=wanted, limits=PLANNED_LIMITS, max_open=max_open))


def host_options(memory_mb: int, max_open: int = 100) -> HostOptions:
    maxima = MAX_LIMITS.model_copy(update={"wall_s": 86_400.0, "memory_mb": memory_mb})
    return HostOptions(max_open=max_open, memory_mb=10**6, share=0.25, maxima=maxima, left_mb=-(10**6))
