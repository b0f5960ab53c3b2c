"""Choose how weights go from the trainer to the servers: through files or through a process group.

Invariant: as far as the config tells, the choice works: servers can reach the directory or address, and NCCL joins GPUs that
are not shared. The plan that a run prints gives the reason.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal
from urllib.parse import urlsplit

from agentrl.engine.config import EngineConfig
from agentrl.inference.config import InferenceConfig, first_gpu, gpu_is_present, runs_on_cpu, tensor_parallel
from agentrl.processes.machine import is_loopback
from agentrl.trainer.config import TrainerConfig
from agentrl.weights.config import SyncConfig

_IDLE = {
    "auto": (),
    "disk": (("sync", "bucket_mb"), ("sync", "backend"), ("sync", "address"), ("sync", "timeout_s")),
    "distributed": (("engine", "publish_dir"),),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """How weights go to the servers."""

    method: Literal["disk", "distributed"]
    sync: SyncConfig
    """The settings, with `backend: gloo` where the config rules NCCL out."""
    reason: str
    """Why this method was chosen."""


def route_of(
    sync: SyncConfig, inference: InferenceConfig, trainer: TrainerConfig, engine: EngineConfig, *, elsewhere: bool = False
) -> Route:
    """Return how weights go to the servers; `elsewhere`: launched ones may start on any node, with GPUs of their own.

    Example:
        >>> route = route_of(SyncConfig(), InferenceConfig(), TrainerConfig(device="cpu"), EngineConfig())
        >>> route.method, route.reason
        ('disk', 'trainer and servers share this host and its disk')
    """
    shared = None if elsewhere else _shared_gpus(inference, trainer)
    if sync.backend == "auto" and shared:
        sync = sync.model_copy(update={"backend": "gloo"})
    if sync.adapter == "adapter":
        return Route(method="disk", sync=sync, reason="sync.adapter: adapter is loaded from files")
    if sync.method != "auto":
        return Route(method=sync.method, sync=sync, reason="sync.method is set")
    if "publish_dir" in engine.model_fields_set and engine.publish_dir is not None:
        return Route(method="disk", sync=sync, reason="engine.publish_dir names a place that every server sees")
    if remote := remote_urls(inference):
        return Route(method="distributed", sync=sync, reason=f"{remote[0]} is on another host, which may not see this disk")
    if elsewhere and not inference.urls:
        return Route(method="distributed", sync=sync, reason="servers start on any node, which may not see this disk")
    if shared is not None and not shared:
        return Route(method="distributed", sync=sync, reason="trainer and servers have GPUs of their own")
    where = "this host and its disk" if not shared else f"GPU {', '.join(map(str, sorted(shared)))}"
    return Route(method="disk", sync=sync, reason=f"trainer and servers share {where}")


def route_problems(
    sync: SyncConfig, inference: InferenceConfig, trainer: TrainerConfig, engine: EngineConfig, *, elsewhere: bool = False
) -> list[str]:
    """Return a line for each setting that cannot work, naming the field and the fix."""
    given = {("sync", name) for name in sync.model_fields_set} | {("engine", name) for name in engine.model_fields_set}
    problems = [
        f"{section}.{name}: sync.method: {sync.method} does not use it; remove it"
        for section, name in idle_fields(sync)
        if (section, name) in given
    ]
    problems += _adapter_route_problems(sync, inference, trainer, engine, elsewhere=elsewhere)
    if sync.backend == "nccl" and trainer.device == "cpu":
        problems.append("sync.backend: nccl joins GPUs, but trainer.device is cpu; set gloo or auto")
    if sync.backend == "nccl" and inference.backend == "embedded":
        problems.append("sync.backend: nccl is SGLang's; the embedded server speaks gloo; set gloo or auto")
    if sync.backend == "nccl" and not elsewhere and (shared := _shared_gpus(inference, trainer)):
        problems.append(f"sync.backend: nccl needs GPUs of their own, trainer and servers share {sorted(shared)}; set gloo")
    if sync.timeout_s >= trainer.call_timeout_s:
        problems.append(
            f"sync.timeout_s: {sync.timeout_s:g} s is not less than the {trainer.call_timeout_s:g} s a call to the trainer "
            "may take (trainer.call_timeout_s), which such a wait is part of; lower it"
        )
    remote = remote_urls(inference)
    if remote and is_loopback(sync.address) and route_of(sync, inference, trainer, engine).method == "distributed":
        problems.append(
            f"sync.address: {remote[0]} is another host, which cannot reach {sync.address}; set this host's address, or "
            "sync: disk and engine.publish_dir to a directory that every server sees"
        )
    return problems


def _adapter_route_problems(
    sync: SyncConfig, inference: InferenceConfig, trainer: TrainerConfig, engine: EngineConfig, *, elsewhere: bool
) -> list[str]:
    problems: list[str] = []
    if trainer.lora is not None and trainer.trainable is not None:
        problems.append("trainer.trainable: trainer.lora trains its adapter only; remove one of the two")
    if sync.adapter != "adapter":
        if inference.pause_mode == "pinned":
            problems.append(
                "inference.pause_mode: pinned needs servers that hold two versions at once, as those of adapters do; set "
                "sync.adapter: adapter with trainer.lora, or pause_mode: exact"
            )
        return problems
    if trainer.lora is None:
        problems.append("sync.adapter: adapter needs one; set trainer.lora, or remove it")
    if sync.method == "distributed":
        problems.append("sync.adapter: adapter is loaded from files; remove sync.method, or set sync.adapter: merged")
    if inference.pause_mode == "fast":
        problems.append(
            "inference.pause_mode: fast keeps KV over an update; with sync.adapter: adapter servers keep none of another "
            "version; set pinned or exact"
        )
    remote = remote_urls(inference)
    if (remote or (elsewhere and not inference.urls)) and engine.publish_dir is None:
        where = remote[0] if remote else "a server on any node"
        problems.append(
            f"sync.adapter: {where} may not see this disk; set engine.publish_dir to a directory that every server sees, or "
            "sync.adapter: merged"
        )
    return problems


def idle_fields(sync: SyncConfig) -> list[tuple[str, str]]:
    """Return `(section, field)` of the settings that the chosen method does not use."""
    return list(_IDLE[sync.method])


def remote_urls(inference: InferenceConfig) -> list[str]:
    """Return the servers that run on other hosts."""
    return [url for url in inference.urls if not is_loopback(urlsplit(url).hostname or "")]


def _shared_gpus(inference: InferenceConfig, trainer: TrainerConfig) -> set[int] | None:
    """Return the GPUs that trainer and servers share; None when one of them uses no GPU or its GPU is unknown."""
    on_gpu = trainer.device.startswith("cuda") or (trainer.device == "auto" and gpu_is_present())
    if inference.urls or inference.backend == "embedded" or not on_gpu or runs_on_cpu(inference):
        return None
    first = [first_gpu(inference, index) for index in range(inference.servers)]
    used = {gpu for start in first for gpu in range(start, start + tensor_parallel(inference))}
    return used & {int(trainer.device.partition(":")[2] or 0)}
