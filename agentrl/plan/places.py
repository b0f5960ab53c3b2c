"""GPUs and places for processes: those that servers and trainer take, those that are missing, and room for `dp: auto`.

Invariant: on this machine only files are read, and no driver is asked. A Ray cluster is asked, and under `attach` the
variables of the scheduler.
"""

from __future__ import annotations

import logging
import os
from math import ceil
from pathlib import Path

from agentrl.config import RunConfig
from agentrl.errors import ConfigError
from agentrl.inference.config import InferenceConfig, first_gpu, gpu_is_present, runs_on_cpu, tensor_parallel
from agentrl.inference.launch.anywhere import with_device
from agentrl.processes.joining import world_in
from agentrl.processes.machine import count_cores
from agentrl.processes.ray import ClusterResources, ray_address, ray_resources
from agentrl.rollout.config import RolloutConfig
from agentrl.trainer.config import TrainerConfig

logger = logging.getLogger(__name__)

EPISODES_PER_WORKER = 128
"""Episodes at once that a worker on a Ray cluster plays by default."""


def count_gpus(root: Path = Path("/")) -> int | None:
    """Return how many GPUs this process may use, by the files under `root`; None: some, but their number is unknown."""
    if not gpu_is_present(root):
        return 0
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len(visible.split(","))
    return len(list((root / "dev").glob("nvidia[0-9]*"))) or None


def index_of(device: str) -> int:
    """Return the number of the GPU that a device names; `cuda` is GPU 0."""
    return int(device.partition(":")[2] or 0)


def server_gpus(inference: InferenceConfig) -> frozenset[int]:
    """Return the GPUs that launched SGLang servers would take, if there are GPUs."""
    if inference.backend != "sglang" or inference.urls:
        return frozenset()
    ways = tensor_parallel(inference)
    return frozenset(first_gpu(inference, index) + way for index in range(inference.servers) for way in range(ways))


def trainer_gpus(trainer: TrainerConfig, inference: InferenceConfig, root: Path = Path("/")) -> int | None:
    """Return how many GPUs the trainer can have: those from `trainer.device` to the next one that a server takes.

    0 where the trainer computes on the CPU or there is no GPU; None: the number of the machine's GPUs is unknown.
    """
    count = count_gpus(root)
    if trainer.device == "cpu" or count == 0:
        return 0
    if count is None:
        return None
    first = index_of(trainer.device)
    taken = frozenset[int]() if runs_on_cpu(inference) else server_gpus(inference)
    last = first + 1
    while last < count and last not in taken:
        last += 1
    return last - first if first < count else 0


def missing_gpus(run: RunConfig, root: Path = Path("/")) -> list[str]:
    """Return the fields that ask for GPUs that this machine lacks, judged by the files under `root`.

    Under `cluster.launcher: ray` there are none: Ray knows the GPUs of the nodes, and the launcher reports what is missing.
    """
    if run.cluster.launcher == "ray":
        return []
    inference, trainer, count = run.inference, run.trainer.device, count_gpus(root)
    found = "there is no GPU" if count == 0 else f"this machine has {count} GPU(s), counted from 0"
    if trainer == "auto" and count:
        trainer = "cuda"
    world = run.trainer.parallel.shape.world
    attached = run.cluster.launcher == "attach"  # its ranks are on other machines
    needed = [] if attached else [("trainer.device", trainer, index_of(trainer) + world - 1)]
    if not inference.urls:
        last = index_of(inference.device)
        if inference.backend == "sglang" and inference.device != "cpu":
            last = max(server_gpus(inference))
        needed.append(("inference.device", inference.device, last))
    missing: list[str] = []
    for field, device, index in needed:
        if device.startswith("cuda") and count is not None and index >= count:
            which = "" if index == index_of(device) else f" for GPU {index_of(device)} to {index}"
            fix = "; lower trainer.parallel.dp" if count and which and field == "trainer.device" else ""
            missing.append(f"{field}: {device}{which}, and {found}{fix}")
    return missing


def shared_gpus(run: RunConfig) -> tuple[int, ...]:
    """Return the GPUs that both the trainer and launched SGLang servers would use."""
    inference, device = run.inference, run.trainer.device
    if inference.backend != "sglang" or inference.urls or device == "cpu" or run.cluster.launcher != "local":
        return ()  # Ray gives each process GPUs of its own, and attached ranks are on machines of their own
    if runs_on_cpu(inference) and (inference.device == "cpu" or device == "auto"):
        return ()
    first = index_of(device)
    return tuple(sorted(server_gpus(inference) & set(range(first, first + run.trainer.parallel.shape.world))))


def trainer_places(run: RunConfig, root: Path = Path("/")) -> int:
    """Return how many processes the trainer can have; 0: one, on the CPU of this machine.

    Under `local` a process takes a GPU from `trainer.device` to the next one of a server. Under `ray` it takes a GPU of the
    cluster, or a core where the cluster has no GPU or `trainer.device` is cpu; servers and rollout workers come first. Under
    `attach` the scheduler says how many processes it starts.

    Raises:
        ConfigError: the number is unknown, the others leave none, or the Ray cluster does not answer.
    """
    if run.cluster.launcher == "attach":
        source, world = world_in(os.environ)
        logger.info("trainer.parallel.dp: auto: %s starts %d trainer ranks", source, world)
        return world
    if run.cluster.launcher == "ray":
        return _places_on(_cluster_of(run, root), run)
    gpus = trainer_gpus(run.trainer, run.inference, root)
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
    inference = with_device(run.inference, has_gpus=cluster.gpus > 0)
    servers = 0 if inference.urls else inference.servers
    workers = num_workers(run.rollout) if run.rollout.runner == "ray" else 0
    if cluster.gpus and run.trainer.device != "cpu":
        kind, total = "GPU(s)", cluster.gpus
        taken = 0 if runs_on_cpu(inference) else len(server_gpus(run.inference))
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
