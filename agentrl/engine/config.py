"""Settings of the run as a whole: length, evaluation, checkpoints, patience."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from pydantic import Field

from agentrl.config.base import Config
from agentrl.inference.backend import LogprobTolerance

ComputeType = Literal["float32", "bfloat16"]
"""The coarser one of the types in which servers and trainer compute."""

# Of a pretrained model of 30 layers in bfloat16, an honest server differs by 0.03 to 0.06 on average and by 0.16 to 0.22 at
# the 99th percentile, up to 0.45 at most; with one layer that is 10 % off, by 0.12 and by 0.56 or more.
PROBE_TOLERANCE: dict[ComputeType, LogprobTolerance] = {
    "float32": LogprobTolerance(largest=1e-3),
    "bfloat16": LogprobTolerance(mean=0.08, tail=0.35),
}
"""Of the probe, where the run file sets none."""

LOGPROB_TOLERANCE: dict[ComputeType, LogprobTolerance] = {
    "float32": LogprobTolerance(mean=0.01),
    "bfloat16": LogprobTolerance(mean=0.08, tail=0.35),
}
"""Of the spot checks, where the run file sets none."""

MIN_BFLOAT16_PROBE = 0.05
"""Smallest `probe_tolerance`, nats, that a correct server in bfloat16 can keep."""

MAX_SKIPPED_CHECKS = 4
"""Batches in a row that are taken without a spot check because servers are loading weights."""

CHECKPOINT_AGE_S = 600.0
"""Seconds after the last checkpoint until the next step is saved: the most work that a killed run loses, in whole steps."""

KEPT_PUBLISHED = 2
"""Newest published weights that stay on disk: a server may still read the one before the newest."""

INTERRUPT_S = 20.0
"""Seconds that an interrupted or failing run has to end its training step and to save it."""


class EngineConfig(Config):
    """When to evaluate, save and give up."""

    steps: int = Field(default=100, ge=1)
    """Training steps; each publishes one policy version."""
    eval_every: int = Field(default=0, ge=0)
    """Steps between evaluations of the current weights on the evaluation tasks; 0: none during the run."""
    eval_episodes: int = Field(default=128, ge=1)
    """Episodes of one evaluation."""
    eval_weights: Literal["live", "frozen"] = "live"
    """Whether servers take new weights during an evaluation. `live`: they do, so that its episodes may hold tokens of
    several versions. `frozen`: they keep one version until it ends; meanwhile the trainer trains one batch and waits."""
    checkpoint_every: int = Field(default=0, ge=0)
    """Steps between checkpoints; 0: by time alone. A step is saved ten minutes after the last one, too, and at the end."""
    keep_checkpoints: int = Field(default=2, ge=1)
    """Newest checkpoints that stay on disk."""
    publish_dir: str | None = None
    """Where published weights go; None: inside the run directory. Must be visible to every server."""
    overlap_publication: bool = False
    """Train the next batch while servers load the weights of the last one, which the trainer keeps in a snapshot. Servers
    that load are not spot checked, so the trainer waits for them after at most four steps without a check."""
    probe_tolerance: float | None = Field(default=None, gt=0)
    """Largest log-prob difference, nats, of server and trainer on the probe prompt after an update. None: 0.001 in float32;
    in bfloat16 a mean of 0.08 and a 99th percentile of 0.35, times 1 + 4 / sqrt(n) for n tokens."""
    logprob_tolerance: float | None = Field(default=None, gt=0)
    """Largest mean difference, nats, of a server's log-probs from the trainer's under the same version, over the tokens of a
    spot check; for n tokens, 1 + 4 / sqrt(n) times as much. A server over it is taken out. None: 0.01 in float32; in
    bfloat16 0.08, and a 99th percentile of 0.35."""
    max_logprob_difference: float | None = Field(default=None, gt=0)
    """The same for each single token of a spot check, and of a batch, where the run stops. None: only report it."""
    stop_after_skipped: int = Field(default=20, ge=0)
    """Steps in a row that train nothing, such as for equal returns, after which the run ends with an error; 0: never."""
    stall_timeout_s: float = Field(default=900.0, gt=0)
    """Seconds without progress after which the run stops and names each wait; longer than an episode's deadline."""
    save_trajectories: bool = True
    """Write every episode, and what each step trained, into `episodes/` in the run directory."""
    keep_episode_steps: int | None = Field(default=None, ge=1)
    """Steps whose training episodes stay on disk; the index and the evaluations stay anyway. None: all steps."""


def probe_bounds(config: EngineConfig, computed: ComputeType) -> LogprobTolerance:
    """Return what the probe may differ by where the coarser side computes in `computed`."""
    asked = config.probe_tolerance
    return PROBE_TOLERANCE[computed] if asked is None else LogprobTolerance(largest=asked)


def spot_bounds(config: EngineConfig, computed: ComputeType) -> LogprobTolerance:
    """Return the same for the calls of a spot check."""
    asked = config.logprob_tolerance
    usual = LOGPROB_TOLERANCE[computed] if asked is None else LogprobTolerance(mean=asked)
    return replace(usual, largest=config.max_logprob_difference)
