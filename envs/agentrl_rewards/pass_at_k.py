"""Advantages that maximise the best of k episodes, for `score_group` of a `GroupWorkflow`.

Invariant: the part that is subtracted for an episode depends on the other episodes alone. So the expected policy gradient is
that of the expected best score among k independent episodes, divided by k (Walder and Karkhanis, arXiv 2505.15201).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import comb, isfinite

import numpy as np

from agentrl.errors import ConfigError
from agentrl.types import MemberAdvantages


def pass_at_k(scores: Sequence[float], k: int | None = None) -> MemberAdvantages:
    """Return each episode's mean gain of the best score: (best of k with it) - (best of the other k - 1).

    The mean is over all choices of the other k - 1 among the group, in closed form. `k` is 2 to the number of members; None:
    all of them.

    Example:
        >>> pass_at_k([0.0, 1.0, 0.25]).values
        [0.0, 0.75, 0.0]
        >>> pass_at_k([0.0, 1.0, 0.25], k=2).values
        [0.0, 0.875, 0.125]
    """
    count = len(scores)
    chosen = count if k is None else k
    if not 2 <= chosen <= count or not all(isfinite(score) for score in scores):
        raise ConfigError(
            f"pass_at_k: expected at least 2 finite scores and k from 2 to their number, got {list(scores)!r:.80} and "
            f"k {k}; for k = 1 return the scores themselves"
        )
    values = np.array(scores, np.float64)
    order = np.argsort(values, kind="stable")
    ascending = values[order]
    # With the others in ascending order, the one at place j is the best of k - 1 of them in comb(j, k - 2) choices.
    choices = comb(count - 1, chosen - 1)
    chances = np.array([comb(place, chosen - 2) / choices for place in range(count)])
    marginal = np.empty(count)
    for place, at in enumerate(order.tolist()):
        marginal[at] = chances[:place] @ (ascending[place] - ascending[:place])
    return MemberAdvantages(marginal.tolist())
