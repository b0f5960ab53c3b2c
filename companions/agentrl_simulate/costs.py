"""The costs of the parts of a simulated run, and the settings of the run that decide who waits for whom.

Invariant: all values are numbers, so a cost model can be written down, changed and compared. Each assumption is a constant
here and is named with a prediction.

Where no run has been measured, costs of GPUs come from their data sheets and the shape of a model. A decode step reads the
weights once and the keys and values of every running request, so it lasts t0 + k t1: the form R k / (k + h), with R = 1 / t1
and h = t0 / t1. These numbers were not measured on GPUs by agentrl. Fit a run of yours as soon as there is one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from agentrl.config import RunConfig
from agentrl.engine.staleness import StalenessPolicy
from agentrl.errors import ConfigError

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


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerCost:
    """One inference server: k requests together get `tokens_per_s` * k / (k + `half_saturation`)."""

    tokens_per_s: float
    """Of the saturated server."""
    half_saturation: float
    """Requests at which it gives half of that."""
    requests: int | None = None
    """The most that run together; others wait in its queue. None: no limit."""
    context_weight: float = 0.0
    """Work of reading a context token, over that of sampling a token."""
    gpus: int = 1

    def seconds_per_token(self, running: int) -> float:
        """Return the seconds between two tokens of one request when `running` run together."""
        return (running + self.half_saturation) / self.tokens_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerCost:
    """The trainer: seconds of a step that do not depend on its tokens, and seconds for each token."""

    fixed_s: float
    """Seconds of every step that trains."""
    gpu_s_per_token: float
    """Seconds of one GPU for a token of context or output."""
    doubling_efficiency: float = 1.0
    """Speed that is left of twice the speed when the GPUs double."""
    measured_gpus: int = 1
    """GPUs of the trainer whose costs these are."""
    gpus_per_sample: int = 1
    """GPUs that work together on one sample, by tensor and context parallelism."""

    def train_s(self, tokens: int, longest: int, gpus: int) -> float:
        """Return the seconds of a step of `tokens` in all; only `gpus_per_sample` GPUs share the `longest` sample."""
        if not tokens:
            return 0.0
        efficiency = self.doubling_efficiency ** math.log2(gpus / self.measured_gpus)
        shared = tokens / gpus / efficiency
        return self.fixed_s + self.gpu_s_per_token * max(shared, longest / min(gpus, self.gpus_per_sample))


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateCost:
    """Seconds of the work around a training step."""

    spot_check_s: float = 0.0
    """Before the batch is taken."""
    publish_s: float = 0.0
    """After the step; servers sample meanwhile."""
    update_s: float = 0.0
    """After that; the version counts at its end."""
    pause_s: float = 0.0
    """The last part of `update_s`, in which servers sample nothing."""
    between_s: float = 0.0
    """Between an update and the next step: what the engine itself does."""
    checkpoint_s: float = 0.0
    """Of one checkpoint; the next step waits for it."""
    num_bytes: int = 0
    """Bytes that each server takes; 0: not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostCost:
    """The processor cores of one machine that driver, servers and trainer share."""

    cores: int | None = None
    """None: servers and trainer have devices of their own."""
    turn_s: float = 0.0
    """Processor seconds of the driver for a turn, and for the end of an episode."""
    batch_s_per_token: float = 0.0
    """Processor seconds of the driver for a token of a batch, before the trainer gets it."""
    server_threads: int = 1
    trainer_threads: int = 1
    """Of one process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """All costs of a run."""

    server: ServerCost
    trainer: TrainerCost
    update: UpdateCost
    host: HostCost = HostCost()
    origin: str
    """Source of the numbers, for people."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunShape:
    """The settings of a run that the simulator obeys."""

    steps: int
    group_size: int
    groups_per_step: int
    max_staleness: int
    policy: StalenessPolicy = "wait"
    slots: int = 64
    """Episodes in flight."""
    keeps_incomplete: bool = False
    """Whether a group with failed members is kept if it has two others."""
    eval_every: int = 0
    """Steps between evaluations; 0: none."""
    eval_episodes: int = 0
    freezes_evaluation: bool = False
    """Whether the trainer publishes no weights during an evaluation (`engine.eval_weights: frozen`)."""
    checkpoint_every: int = 0
    """Steps between checkpoints; 0: none."""
    overlaps_publication: bool = False
    """Whether the trainer trains the next batch while servers load weights (`engine.overlap_publication`)."""
    rereads_context: bool = True
    """Whether a server reads contexts again that it read before an update (all `inference.pause_mode` but `fast`)."""
    pins_calls: bool = False
    """Whether a running call keeps its version within the staleness bound (`inference.pause_mode: pinned`)."""
    total_steps: int | None = None
    """Length of the run: no groups open for later steps. None: the run is longer than what is played."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """The machines of a simulated run."""

    servers: int
    """Inference servers, each of `ServerCost.gpus` GPUs."""
    trainer_gpus: int
    """GPUs of the trainer; on a CPU, its processes."""


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
    adapter_parameters: int = 0
    """Of the LoRA adapter that is trained; 0: all weights are."""


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
    served_adapters: int = 0
    """LoRA adapters that a server holds at once, which an update sends alone; 0: it sends whole weights."""


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
    held = 2 * (model.parameters + use.served_adapters * model.adapter_parameters)
    room = SERVER_MEMORY_SHARE * sheet.memory * use.server_gpus - held
    fits = int(min(MOST_REQUESTS, room / (model.kv_bytes_per_token * use.mean_tokens)))
    if fits < 1:
        raise ConfigError(
            f"a server of {use.server_gpus} {name} has no room for {model.parameters / 1e9:.1f}e9 parameters and one "
            f"episode of {use.mean_tokens:.0f} tokens; give it more GPUs with inference.sglang_args: [--tp-size, N]"
        )
    requests = fits if use.requests is None else min(fits, use.requests)
    # Operations for each parameter: proximal 2, forward 2, backward 4 or, through frozen weights, 2, recomputed 2.
    passes = (6 if model.adapter_parameters else 8) + 2 * use.checkpointing
    attention = passes * model.attention_width * use.mean_tokens / 2
    per_token = (passes * model.parameters + attention) / (sheet.flops * TRAIN_FLOPS_SHARE)
    sent = 4 * model.adapter_parameters if use.served_adapters else 2 * model.parameters
    update_s = 1.0 + sent / WEIGHT_BYTES_PER_S
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
            pause_s=0.0 if use.served_adapters else update_s,
            num_bytes=sent,
        ),
        origin=f"data sheet of {name.lower()} and assumed efficiencies (companions/agentrl_simulate/costs.py), not measured",
    )


def shape_of_run(run: RunConfig, steps: int | None = None) -> RunShape:
    """Return the settings of a run; `steps` plays only so many, as the beginning of the run."""
    algorithm, rollout, engine, mode = run.algorithm, run.rollout, run.engine, run.resolved_inference.pause_mode
    count = engine.steps if steps is None else min(steps, engine.steps)
    return RunShape(
        steps=count,
        group_size=algorithm.group_size,
        groups_per_step=algorithm.groups_per_step,
        max_staleness=algorithm.max_staleness,
        policy=algorithm.staleness_policy,
        slots=rollout.max_concurrent_episodes,
        keeps_incomplete=rollout.incomplete_group == "keep",
        eval_every=engine.eval_every,
        eval_episodes=engine.eval_episodes if engine.eval_every else 0,
        freezes_evaluation=engine.eval_weights == "frozen",
        checkpoint_every=engine.checkpoint_every,
        overlaps_publication=engine.overlap_publication,
        rereads_context=mode != "fast",
        pins_calls=mode == "pinned",
        total_steps=engine.steps,
    )


def fleet_of_run(run: RunConfig) -> Fleet:
    """Return the servers and trainer processes that a run file asks for."""
    return Fleet(servers=len(run.inference.urls) or run.inference.servers, trainer_gpus=run.trainer.parallel.shape.world)
