"""Settings of the advantage, the loss and the staleness bound."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from agentrl.config.base import Config


class AlgorithmConfig(Config):
    """Decoupled PPO (AReaL, arXiv 2505.24298, section 5) over groups of episodes."""

    group_size: int = Field(default=8, ge=2)
    """Episodes of one task; their mean return is the baseline."""
    groups_per_step: int = Field(default=16, ge=1)
    """Groups in one optimizer batch."""
    advantage: Literal["episode", "turn"] = "episode"
    """`episode`: return minus group mean, for every token. `turn`: return-to-go with a leave-one-out group baseline."""
    discount: float = Field(default=1.0, gt=0, le=1)
    """Per-turn discount of the `turn` advantage."""
    normalize_std: bool = False
    """Divide advantages by their root mean square in the group: the standard deviation of the returns for `episode`, a mean
    over all turns of the group for `turn`. Biases towards tasks of extreme difficulty, so off."""
    max_staleness: int = Field(default=2, ge=0)
    """Published versions a trained token may be behind; 0 is synchronous RL."""
    staleness_policy: Literal["wait", "mask", "drop"] = "wait"
    """Over-age tokens: `wait` for the oldest groups before moving the version, `mask` the tokens, or `drop` the group."""
    clip_low: float = Field(default=0.2, gt=0, lt=1)
    """PPO clips current/proximal ratios below `1 - clip_low`."""
    clip_high: float = Field(default=0.2, gt=0)
    """PPO clips current/proximal ratios above `1 + clip_high`."""
    behavior_weight_cap: float = Field(default=5.0, gt=0)
    """Largest proximal/behavior ratio of a token."""
    behavior_weight_mode: Literal["clamp", "mask"] = "mask"
    """A token over the cap is clamped to it, or leaves the loss."""
