"""The GPUs that launched SGLang servers take, by the settings of a run file and the files of the system."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from agentrl.errors import ConfigError
from agentrl.inference.config import InferenceConfig

_TENSOR_PARALLEL = ("--tp", "--tp-size", "--tensor-parallel-size")


def gpu_is_present(root: Path = Path("/")) -> bool:
    """Return whether this machine has a GPU that this process may use, according to the system's files."""
    if os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1"):
        return False
    devices = [*(root / "dev").glob("nvidia[0-9]*"), *(root / "proc/driver/nvidia/gpus").glob("*")]
    return bool(devices) or (root / "dev/kfd").exists()


def flag_value(arguments: Sequence[str], *names: str) -> str | None:
    """Return the value of the last of the flags `names` in `arguments`; None if there is none.

    Example:
        >>> flag_value(["--device", "cpu", "--tp=2"], "--tp", "--tp-size"), flag_value(["--tp", "2"], "--device")
        ('2', None)
    """
    found: str | None = None
    for at, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        if name in names:
            found = value if equals else "".join(arguments[at + 1 : at + 2])
    return found


def runs_on_cpu(config: InferenceConfig) -> bool:
    """Return whether launched SGLang servers compute on the CPU."""
    asked = flag_value(config.sglang_args, "--device") or config.device
    return not gpu_is_present() if asked == "auto" else asked == "cpu"


def tensor_parallel(config: InferenceConfig) -> int:
    """Return how many GPUs one launched SGLang server takes; a `ConfigError` if `sglang_args` gives no number."""
    given = flag_value(config.sglang_args, *_TENSOR_PARALLEL) or "1"
    if not given.isdecimal() or int(given) < 1:
        raise ConfigError(f"inference.sglang_args: {_TENSOR_PARALLEL[0]} {given}: expected a number of GPUs")
    return int(given)


def first_gpu(config: InferenceConfig, index: int) -> int:
    """Return the number of the first GPU of launched SGLang server `index`; no two servers share a GPU.

    Example:
        >>> first_gpu(InferenceConfig(sglang_args=("--tp", "2")), 3), first_gpu(InferenceConfig(device="cuda:4"), 1)
        (6, 5)
    """
    return int(config.device.partition(":")[2] or 0) + index * tensor_parallel(config)
