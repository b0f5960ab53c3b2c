"""A guard against stale data: the learning rate follows the effective sample size.

Invariant: the factor is 1 where the data are fresh, and never above. No torch.

Source: VCPO, https://github.com/mit-han-lab/vcpo: the variance of an importance-weighted gradient grows as 1 / ESS.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np


def sequence_ess_ratio(log_weights: Sequence[float]) -> float:
    """Return (sum W)^2 / (B sum W^2) of B sequences with the log weights `log_weights`, from 1 / B to 1 (Kong 1992).

    Example:
        >>> sequence_ess_ratio([0.3, 0.3])
        1.0
    """
    if not log_weights:
        return 1.0
    logs = np.asarray(log_weights, np.float64)
    weights = np.exp(logs - logs.max())
    return min(float(weights.sum() ** 2 / (len(weights) * (weights**2).sum())), 1.0)


def learning_rate_factor(ess_ratio: float, base: float = 1.0) -> float:
    """Return sqrt(min(1, ess_ratio / base)), the factor of the learning rate.

    Example:
        >>> learning_rate_factor(0.25)
        0.5
    """
    if not (0 <= ess_ratio <= 1 and base > 0):
        raise ValueError(f"expected an ess_ratio from 0 to 1 and a base above 0, got {ess_ratio} and {base}")
    return math.sqrt(min(1.0, ess_ratio / base))
