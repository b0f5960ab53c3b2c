"""A guard against stale data: the learning rate follows the effective sample size. No torch.

Invariant: the factor is 1 where the data are fresh, and never above.

Source: VCPO (Huang et al., arXiv 2602.17616): the variance of an importance-weighted gradient grows as 1 / ESS.
"""

from __future__ import annotations

import math

from pydantic import Field

from agentrl.algo.slots import Bundled, NoOptions, row
from agentrl.config.base import Config

GUARDS: dict[str, Bundled] = {}


def learning_rate_factor(ratio: float, base: float = 1.0) -> float:
    """Return sqrt(min(1, ratio / base)), the factor of the learning rate.

    Example:
        >>> learning_rate_factor(0.25)
        0.5
    """
    if not (0 <= ratio <= 1 and base > 0):
        raise ValueError(f"expected a ratio from 0 to 1 and a base above 0, got {ratio} and {base}")
    return math.sqrt(min(1.0, ratio / base))


@row(GUARDS, "none", "1")
def unguarded(ratio: float, options: NoOptions) -> float:
    """1: the learning rate is that of the schedule."""
    return 1.0


class EffectiveSamplesOptions(Config):
    """Options of `effective_samples`."""

    base: float = Field(default=1.0, gt=0, le=1)
    """Ratio of effective samples from which on the learning rate is whole."""


@row(GUARDS, "effective_samples", "sqrt(min(1, ESS / (samples * {base})))")
def effective_samples(ratio: float, options: EffectiveSamplesOptions) -> float:
    """sqrt(min(1, ratio / base)), the ratio that of effective samples (arXiv 2602.17616)."""
    return learning_rate_factor(ratio, options.base)
