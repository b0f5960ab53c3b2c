"""The costs of the parts of a simulated run, and the settings of the run that decide who waits for whom.

Invariant: all values are numbers, so a cost model can be written down, changed and compared.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from agentrl.engine.staleness import StalenessPolicy


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
    """GPUs that work together on one sample: those of tensor and context parallelism."""

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
    """Whether a group with failed members is kept if it has `min_group_size` others."""
    min_group_size: int = 2
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
    """Whether a server reads contexts again that it read before an update (`inference.pause_mode: exact`)."""
    total_steps: int | None = None
    """Length of the run: no groups open for later steps. None: the run is longer than what is played."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """The machines of a simulated run."""

    servers: int
    """Inference servers, each of `ServerCost.gpus` GPUs."""
    trainer_gpus: int
    """GPUs of the trainer; on a CPU, its processes."""
