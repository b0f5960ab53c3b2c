"""Options of the bundled policy losses. No torch: the driver checks them."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from agentrl.config.base import Config


class PpoOptions(Config):
    """Options of `ppo`."""

    clip_low: float = Field(default=0.2, gt=0, lt=1)
    """Ratios below `1 - clip_low` are clipped."""
    clip_high: float = Field(default=0.2, gt=0)
    """Ratios above `1 + clip_high` are clipped."""


class DualClipOptions(PpoOptions):
    """Options of `dual_clip`."""

    floor: float = Field(default=3.0, gt=1)
    """A negative advantage counts at most this many times."""


class GspoOptions(Config):
    """Options of `gspo`."""

    clip_low: float = Field(default=3e-4, gt=0, lt=1)
    """Segment ratios below `1 - clip_low` are clipped."""
    clip_high: float = Field(default=4e-4, gt=0)
    """Segment ratios above `1 + clip_high` are clipped."""
    segment: Literal["turn", "sample"] = "turn"
    """Tokens that share one ratio: a turn, or all trained turns of a branch."""


class CispoOptions(Config):
    """Options of `cispo`."""

    clip_high: float = Field(default=4.0, gt=0)
    """Ratios above `1 + clip_high` are cut to it."""


class SapoOptions(Config):
    """Options of `sapo`."""

    positive: float = Field(default=1.0, gt=0)
    """Temperature for positive advantages."""
    negative: float = Field(default=1.05, gt=0)
    """Temperature for the others."""


class DppoTvOptions(Config):
    """Options of `dppo_tv`."""

    low: float = Field(default=0.2, gt=0, le=1)
    """Largest fall of a token's probability before a negative advantage stops counting."""
    high: float = Field(default=0.2, gt=0, le=1)
    """Largest rise before a positive one stops counting."""
    cap: float = Field(default=20.0, gt=0)
    """Largest weight current / behavior."""


class VespoOptions(Config):
    """Options of `vespo`."""

    power_positive: float = Field(default=2.0, ge=0)
    """k for advantages of at least 0."""
    decay_positive: float = Field(default=3.0, ge=0)
    """lambda for advantages of at least 0."""
    power_negative: float = Field(default=3.0, ge=0)
    """k for negative advantages."""
    decay_negative: float = Field(default=2.0, ge=0)
    """lambda for negative advantages."""
    segment: Literal["turn", "sample"] = "sample"
    """Tokens whose weights are multiplied."""


class M2poOptions(Config):
    """Options of `m2po`."""

    budget: float = Field(default=0.04, gt=0)
    """Largest mean square of the log ratios of harmful tokens."""
    least_low: float = Field(default=0.3, gt=0, lt=1)
    """The lower bound of the ratio is never above `1 - least_low`."""
    least_high: float = Field(default=0.5, gt=0)
    """The upper bound is never below `1 + least_high`."""
    over: Literal["sample", "microbatch"] = "sample"
    """Tokens that share a budget. `microbatch` is the published code, whose loss depends on the packing."""


class KimiOptions(Config):
    """Options of `kimi`."""

    tau: float = Field(default=0.1, ge=0)
    """Weight of the square of the log ratio."""
