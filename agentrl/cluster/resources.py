"""What the machines of a run have, asked before the run starts: of a Ray cluster its cores and GPUs.

Invariant: a connection that was opened for the question is closed, and no cluster is started for it.
"""

from __future__ import annotations

from typing import NamedTuple

import anyio

from agentrl.cluster.config import ClusterConfig
from agentrl.cluster.ray import import_ray, open_ray


class ClusterResources(NamedTuple):
    """What the nodes of a cluster have together, whether it is free or not."""

    cpus: int
    gpus: int


def ray_resources(config: ClusterConfig) -> ClusterResources:
    """Return what the Ray cluster at `cluster.address` has; a program without a connection connects for the question.

    Call it outside of an event loop, except where this program is connected.

    Raises:
        ConfigError: Ray is not installed, or no cluster answers at the address.
    """
    return _counted() if import_ray().is_initialized() else anyio.run(_connect_and_count, config)


async def _connect_and_count(config: ClusterConfig) -> ClusterResources:
    async with open_ray(config):
        return _counted()


def _counted() -> ClusterResources:
    found: dict[str, float] = import_ray().cluster_resources()
    return ClusterResources(cpus=int(found.get("CPU", 0)), gpus=int(found.get("GPU", 0)))
