"""How to load and run a model in the embedded engine.

Invariant: a device that `device_of` returns can hold tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from agentrl.errors import ConfigError
from agentrl.inference.embedded.hazards import Hazard


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """How to load and run a model."""

    model_path: str
    """Local HF directory: config.json and safetensors; tokenizer.json where text or stop strings are wanted."""
    weight_version: str = "0"
    max_running_requests: int = 64
    max_context_tokens: int = 4096
    """SGLang's --context-length: prompts end `CONTEXT_RESERVE` + 1 tokens short of it, outputs 2; capped by the model's."""
    device: str = "cpu"
    dtype: Literal["float32", "float16", "bfloat16"] = "float32"
    memory_fraction: float = 0.25
    """Share of the device's memory that the KV cache may grow to."""
    random_seed: int = 0
    """Seeds the requests that bring no seed."""
    faults: frozenset[Hazard] = frozenset()
    """Hazards of SGLang's to copy, for tests of clients."""


def device_of(name: str) -> torch.device:
    """Return a usable torch device; `auto` is CUDA where there is one.

    Raises:
        ConfigError: when it cannot be used.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"device {name!r} cannot be used: {error}") from error
    return device
