"""Which models a run can train, judged by config.json or, without that file, by the published Qwen3 that the path names.

Invariant: nothing is loaded. A model that is refused here is refused before anything starts.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from agentrl.config import RunConfig
from agentrl.plan.memory import model_shape_of

_EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Fields of config.json that give the number of experts, by family."""


def model_problems(run: RunConfig) -> list[str]:
    """Return why the run's model cannot be trained, with what can; none where it can, or where nothing is known of it."""
    path = run.model.local_path or run.model.path
    experts = _experts(path)
    if experts < 2:
        return []
    return [
        f"model.path: {run.model.path} is a mixture of {experts} experts, which agentrl does not train: its trainer holds "
        "the experts of a layer as one tensor, and servers load them one by one; use a dense model of the architectures "
        "Qwen2, Qwen3, Llama or Mistral"
    ]


def _experts(path: str) -> int:
    try:
        config: dict[str, Any] = json.loads((Path(path) / "config.json").read_bytes())
    except (OSError, ValueError):
        shape = model_shape_of(path)
        return 0 if shape is None else shape.experts
    text = config.get("text_config") or config
    given = [text.get(key) for key in _EXPERT_KEYS]
    return max((count for count in given if isinstance(count, int)), default=0)
