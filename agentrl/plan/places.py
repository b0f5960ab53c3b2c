"""How many trainer processes there is room for: what `trainer.parallel.dp: auto` divides by the other axes.

Invariant: on this machine only files are read. A Ray cluster is asked, and under `attach` the variables of the scheduler.
"""

from __future__ import annotations

import logging
import os
from math import ceil
from pathlib import Path

from agentrl.cluster.rank_numbers import world_in
from agentrl.cluster.ray import ray_address
from agentrl.cluster.resources import ClusterResources, ray_resources
from agentrl.config import RunConfig
from agentrl.errors import ConfigError
from agentrl.hosts import count_cores
from agentrl.inference.launch.anywhere import with_device
from agentrl.inference.launch.sglang import runs_on_cpu
from agentrl.plan.gpus import count_gpus, server_gpus, trainer_gpus
from agentrl.rollout.config import RolloutConfig

logger = logging.getLogger(__name__)

EPISODES_PER_WORKER = 128
"""Episodes at once that a worker on a Ray cluster plays by default."""


def trainer_places(run: RunConfig, root: Path = Path("/")) -> int:
    """Return how many processes the trainer can have; 0: one, on the CPU of this machine.

    Under `local` a process takes a GPU from `trainer.device` to the next one of a server. Under `ray` it takes a GPU of the
    cluster, or a core where the cluster has no GPU or `trainer.device` is cpu; servers and rollout workers come first. Under
    `attach` the scheduler says how many processes it starts.

    Args:
        run: the run.
        root: of the files that tell this machine's GPUs.

    Raises:
        ConfigError: the number is unknown, the others leave none, or the Ray cluster does not answer.
    """
    if run.cluster.launcher == "attach":
        source, world = world_in(os.environ)
        logger.info("trainer.parallel.dp: auto: %s starts %d trainer ranks", source, world)
        return world
    if run.cluster.launcher == "ray":
        return _places_on(_cluster_of(run, root), run)
    gpus = trainer_gpus(run, root)
    if gpus is None:
        raise ConfigError("trainer.parallel.dp: auto, and the number of this machine's GPUs is unknown; give a number")
    return gpus


def _cluster_of(run: RunConfig, root: Path) -> ClusterResources:
    if ray_address(run.cluster) != "local":
        return ray_resources(run.cluster)
    gpus = count_gpus(root)
    if gpus is None:
        raise ConfigError("trainer.parallel.dp: auto, and the number of this machine's GPUs is unknown; give a number")
    return ClusterResources(cpus=count_cores(), gpus=gpus)


def _places_on(cluster: ClusterResources, run: RunConfig) -> int:
    """Return the GPUs or cores that servers and rollout workers leave to the trainer."""
    inference = with_device(run.inference, has_gpus=cluster.gpus > 0)
    servers = 0 if inference.urls else inference.servers
    workers = num_workers(run.rollout) if run.rollout.runner == "ray" else 0
    if cluster.gpus and run.trainer.device != "cpu":
        kind, total = "GPU(s)", cluster.gpus
        taken = 0 if runs_on_cpu(inference) else len(server_gpus(run))
        if inference.backend == "embedded" and inference.device.startswith("cuda"):
            taken = servers
        users = f"{servers} server(s)"
    else:
        kind, total, taken = "core(s)", cluster.cpus, servers + workers
        users = f"{servers} server(s) and {workers} rollout worker(s)"
    if taken >= total:
        raise ConfigError(
            f"trainer.parallel.dp: auto, and the Ray cluster has {total} {kind}, of which {users} take {taken}; add nodes, "
            "or lower inference.servers or rollout.workers"
        )
    logger.info(
        "trainer.parallel.dp: auto: the Ray cluster has %d %s, and %s take %d; the trainer gets %d",
        total,
        kind,
        users,
        taken,
        total - taken,
    )
    return total - taken


def num_workers(rollout: RolloutConfig) -> int:
    """Return how many workers play the episodes of a run."""
    if rollout.workers != "auto":
        return rollout.workers
    if rollout.runner == "ray":
        return ceil(rollout.max_concurrent_episodes / EPISODES_PER_WORKER)
    return max(1, min(count_cores() - 1, rollout.max_concurrent_episodes))
