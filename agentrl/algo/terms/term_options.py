"""Options of the bundled terms, and the schedule of a weight. No torch: the driver checks them."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from agentrl.config.base import Config


class EntropyOptions(Config):
    """Options of `entropy`."""

    weight: float = Field(default=0.001, ge=0)
    """Factor of the term at the first step."""
    final_weight: float | None = Field(default=None, ge=0)
    """Factor after `over_steps`; None: `weight` all along."""
    over_steps: int = Field(default=0, ge=0)
    """Training steps in which the factor goes from `weight` to `final_weight`, in a line."""

    @model_validator(mode="after")
    def _has_an_end(self) -> Self:
        if (self.final_weight is None) != (self.over_steps == 0):
            raise ValueError("expected final_weight and over_steps together; set both, or neither for a constant weight")
        return self


class KlOptions(Config):
    """Options of `kl`."""

    weight: float = Field(default=0.001, ge=0)
    """Factor of the term."""
    k: Literal[1, 2, 3] = 2
    """Estimator. The gradient of 2 is that of the KL; of 3, that of the other direction; of 1, 0 on average."""


class LogRatioOptions(Config):
    """Options of `log_ratio`."""

    weight: float = Field(default=0.001, ge=0)
    """Factor of the term."""


class ValueOptions(Config):
    """Options of `value`."""

    weight: float = Field(default=0.5, ge=0)
    """Factor of the term; under `critic.model: trunk` it says how much the critic's loss moves the policy."""
    clip: float | None = Field(default=0.2, gt=0)
    """How far the values that are trained may go from those before the batch; none: as far as they like."""


def weight_at(options: EntropyOptions | KlOptions | LogRatioOptions, step: int) -> float:
    """Return the factor of a term at training step `step`, from 0.

    Example:
        >>> weight_at(EntropyOptions(weight=0.1, final_weight=0.0, over_steps=4), 1)
        0.075
    """
    if not isinstance(options, EntropyOptions) or options.final_weight is None:
        return options.weight
    return options.weight + (options.final_weight - options.weight) * min(step / options.over_steps, 1.0)
