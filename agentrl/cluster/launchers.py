"""The launcher that a run file names."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from agentrl.cluster.base import Launcher
from agentrl.cluster.config import ClusterConfig
from agentrl.cluster.local import LocalLauncher
from agentrl.cluster.ray import open_ray


@asynccontextmanager
async def open_launcher(config: ClusterConfig) -> AsyncGenerator[Launcher]:
    """Yield the launcher of `config`; it serves the servers and the trainer of one run.

    Under `attach` it starts processes on this machine: only the trainer ranks come from elsewhere.

    Raises:
        ConfigError: a package is missing, or there is no cluster at `cluster.address`.

    Cancellation: what the launcher itself started, such as a Ray cluster on this machine, ends.
    """
    if config.launcher == "ray":
        async with open_ray(config) as launcher:
            yield launcher
    else:
        yield LocalLauncher()
