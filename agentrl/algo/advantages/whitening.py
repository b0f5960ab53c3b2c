"""Normalization of the advantages of a whole batch.

Invariant: the token mean of the result is 0 and its standard deviation 1, or all of it is exactly 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from agentrl.algo.advantages.players import ROUNDING, Float64Array


def whiten(
    per_group: Sequence[Sequence[Float64Array]], tokens: Sequence[Sequence[Float64Array]]
) -> list[list[Float64Array]]:
    """Return (A - mean) / std of all turns of a batch, each weighted by its tokens of the loss (arXiv 2501.03262, eq. 8).

    Both arguments hold, for each group, one [turns] array for each episode. A turn without tokens has no weight.
    """
    flat = np.concatenate([values for group in per_group for values in group] or [np.zeros(0)])
    weights = np.concatenate([counts for group in tokens for counts in group] or [np.zeros(0)])
    largest = float(np.abs(flat).max(initial=0.0)) or 1.0
    total = math.fsum(weights)
    scaled = flat / largest
    mean = math.fsum(weights * scaled) / total if total else 0.0
    deviation = math.sqrt(math.fsum(weights * (scaled - mean) ** 2) / total) if total else 0.0
    if deviation <= ROUNDING:
        return [[np.zeros(len(values)) for values in group] for group in per_group]
    return [[(values / largest - mean) / deviation for values in group] for group in per_group]
