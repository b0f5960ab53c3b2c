"""Options of the terms, with the schedule of a weight that all of them have. No torch: the driver checks them."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from agentrl.config.base import Config


class WeightSchedule(Config):
    """Options that every term has, also a user's."""

    weight: float
    """Factor of the term at the first step."""
    final_weight: float | None = None
    """Factor after `over_steps`; None: `weight` all along."""
    over_steps: int = Field(default=0, ge=0)
    """Training steps in which the factor goes from `weight` to `final_weight`, in a line."""

    @model_validator(mode="after")
    def _has_an_end(self) -> Self:
        if (self.final_weight is None) != (self.over_steps == 0):
            raise ValueError("expected final_weight and over_steps together; set both, or neither for a constant weight")
        return self


class BundledTermOptions(WeightSchedule):
    """Options that every bundled term has; none is a bonus."""

    weight: float = Field(default=0.001, ge=0)
    """Factor of the term at the first step."""
    final_weight: float | None = Field(default=None, ge=0)
    """Factor after `over_steps`; None: `weight` all along."""


class EntropyOptions(BundledTermOptions):
    """Options of `entropy`."""


class KlOptions(BundledTermOptions):
    """Options of `kl`."""

    k: Literal[1, 2, 3] = 2
    """Estimator. The gradient of 2 is that of the KL; of 3, that of the other direction; of 1, 0 on average."""


class LogRatioOptions(BundledTermOptions):
    """Options of `log_ratio`."""


class ValueOptions(BundledTermOptions):
    """Options of `value`."""

    weight: float = Field(default=0.5, ge=0)
    """Factor at the first step; under `critic.model: trunk` it says how much the critic's loss moves the policy."""
    clip: float | None = Field(default=0.2, gt=0)
    """How far the values that are trained may go from those before the batch; none: as far as they like."""
