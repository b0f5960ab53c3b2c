"""The GPUs of this machine that a run asks for: which ones servers and trainer take, and which are missing.

Invariant: nothing is started and no driver is asked; the system's files say how many GPUs there are.
"""

from __future__ import annotations

import os
from pathlib import Path

from agentrl.config import RunConfig
from agentrl.inference.launch.sglang import first_gpu, gpu_is_present, runs_on_cpu, tensor_parallel


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


def server_gpus(run: RunConfig) -> frozenset[int]:
    """Return the GPUs that launched SGLang servers would take, if there are GPUs."""
    inference = run.inference
    if inference.backend != "sglang" or inference.urls:
        return frozenset()
    ways = tensor_parallel(inference)
    return frozenset(first_gpu(inference, index) + way for index in range(inference.servers) for way in range(ways))


def trainer_gpus(run: RunConfig, root: Path = Path("/")) -> int | None:
    """Return how many GPUs the trainer can have: those from `trainer.device` to the next one that a server takes.

    0 where the trainer computes on the CPU or there is no GPU; None: the number of the machine's GPUs is unknown.
    """
    count = count_gpus(root)
    if run.trainer.device == "cpu" or count == 0:
        return 0
    if count is None:
        return None
    first = index_of(run.trainer.device)
    taken = frozenset[int]() if runs_on_cpu(run.inference) else server_gpus(run)
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
            last = max(server_gpus(run))
        needed.append(("inference.device", inference.device, last))
    missing: list[str] = []
    for field, device, index in needed:
        if device.startswith("cuda") and count is not None and index >= count:
            which = "" if index == index_of(device) else f" for GPU {index_of(device)} to {index}"
            fix = "; lower trainer.parallel.dp" if count and which and field == "trainer.device" else ""
            missing.append(f"{field}: {device}{which}, and {found}{fix}")
    return missing
