"""Default costs of GPUs, from their data sheets and the shape of a model, where no run has been measured.

Invariant: everything assumed is a constant here and is named with a prediction. A decode step reads the weights once and the
keys and values of every running request, so it lasts t0 + k t1: the form R k / (k + h), with R = 1 / t1 and h = t0 / t1.

These numbers were not measured on GPUs by agentrl. Fit a run of yours as soon as there is one.
"""

from __future__ import annotations

from dataclasses import dataclass

from agentrl.errors import ConfigError
from agentrl.simulate.costs.model import CostModel, ServerCost, TrainerCost, UpdateCost

DECODE_BANDWIDTH_SHARE = 0.7
"""Share of the memory bandwidth that decoding reaches."""
DECODE_STEP_S = 0.003
"""Seconds of a decode step apart from memory and arithmetic: launches, sampling, scheduling."""
PREFILL_FLOPS_SHARE = 0.5
"""Share of the arithmetic that reading contexts reaches."""
TRAIN_FLOPS_SHARE = 0.35
"""Share of the arithmetic that training reaches on one GPU."""
DOUBLING_EFFICIENCY = 0.97
"""Speed of the trainer that is left at each doubling of its GPUs."""
SERVER_MEMORY_SHARE = 0.85
"""Share of a GPU's memory for weights and cache."""
MOST_REQUESTS = 512
"""The most requests that a server decodes together."""
WEIGHT_BYTES_PER_S = 10e9
"""Bytes/s at which new weights reach the servers."""
STEP_FIXED_S = 2.0
"""Seconds of a training step that do not depend on its tokens."""
SPOT_CHECK_S = 1.0
"""Seconds of the spot check before a step."""


@dataclass(frozen=True, slots=True)
class GpuSheet:
    """The data sheet of a GPU."""

    flops: float
    """Dense bfloat16 operations/s."""
    bandwidth: float
    """Bytes/s of its memory."""
    memory: float
    """Bytes."""


GPUS = {
    "a100": GpuSheet(312e12, 2.04e12, 80e9),
    "h100": GpuSheet(989e12, 3.35e12, 80e9),
    "h200": GpuSheet(989e12, 4.8e12, 141e9),
    "b200": GpuSheet(2250e12, 8.0e12, 192e9),
    "l40s": GpuSheet(362e12, 0.864e12, 48e9),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """The shape of a model, as the defaults need it."""

    parameters: int
    kv_bytes_per_token: int
    """Keys and values of one token in all layers, bytes."""
    attention_width: int
    """Layers times heads times head size: the arithmetic of attention for each pair of tokens, over 4."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AssumedUse:
    """The assumed use of GPUs by a run."""

    mean_tokens: float
    """Tokens of an episode, contexts included."""
    server_gpus: int = 1
    sample_gpus: int = 1
    """GPUs that train one sample together."""
    checkpointing: bool = False
    """Whether activations are recomputed."""
    requests: int | None = None
    """The most requests of a server that the run file allows; None: as many as fit."""


def gpu_sheet(name: str) -> GpuSheet:
    """Return the data sheet of a GPU; raises ConfigError where there is none of this name."""
    try:
        return GPUS[name.lower()]
    except KeyError:
        raise ConfigError(f"expected a GPU out of {', '.join(GPUS)}, got {name!r}; or fit a run with --from") from None


def gpu_costs(name: str, model: ModelSize, use: AssumedUse) -> CostModel:
    """Return the default costs of a model on a GPU.

    Raises:
        ConfigError: there is no such GPU, or the weights do not fit into the memory of a server.
    """
    sheet = gpu_sheet(name)
    seconds_per_byte = 1 / (use.server_gpus * sheet.bandwidth * DECODE_BANDWIDTH_SHARE)
    read_s = 2 * model.parameters / (use.server_gpus * sheet.flops * PREFILL_FLOPS_SHARE)
    cache = model.kv_bytes_per_token * use.mean_tokens / 2  # of a request half-way through its episode
    step_s = DECODE_STEP_S + 2 * model.parameters * seconds_per_byte
    request_s = cache * seconds_per_byte + read_s
    room = SERVER_MEMORY_SHARE * sheet.memory * use.server_gpus - 2 * model.parameters
    fits = int(min(MOST_REQUESTS, room / (model.kv_bytes_per_token * use.mean_tokens)))
    if fits < 1:
        raise ConfigError(
            f"a server of {use.server_gpus} {name} has no room for {model.parameters / 1e9:.1f}e9 parameters and one "
            f"episode of {use.mean_tokens:.0f} tokens; give it more GPUs with inference.sglang_args: [--tp-size, N]"
        )
    requests = fits if use.requests is None else min(fits, use.requests)
    passes = 8 + 2 * use.checkpointing  # proximal 2, forward 2, backward 4, recomputed 2; operations for each parameter
    attention = passes * model.attention_width * use.mean_tokens / 2
    per_token = (passes * model.parameters + attention) / (sheet.flops * TRAIN_FLOPS_SHARE)
    update_s = 1.0 + 2 * model.parameters / WEIGHT_BYTES_PER_S
    return CostModel(
        server=ServerCost(
            tokens_per_s=1 / request_s,
            half_saturation=step_s / request_s,
            requests=requests,
            context_weight=read_s / (step_s + request_s * requests / 2),
            gpus=use.server_gpus,
        ),
        trainer=TrainerCost(
            fixed_s=STEP_FIXED_S,
            gpu_s_per_token=per_token,
            doubling_efficiency=DOUBLING_EFFICIENCY,
            gpus_per_sample=use.sample_gpus,
        ),
        update=UpdateCost(
            spot_check_s=SPOT_CHECK_S,
            publish_s=update_s,
            update_s=update_s,
            pause_s=update_s,
        ),
        origin=f"data sheet of {name.lower()} and assumed efficiencies (agentrl/simulate/costs/hardware.py), not measured",
    )
