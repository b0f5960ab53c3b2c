"""Who computes which forward pass. numpy only.

Invariant: each pass of the plan is computed by exactly one rank, and all ranks compute the same number of passes, so that
none waits in a collective that another never enters.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class DealtPass(NamedTuple):
    """One forward pass of a rank."""

    samples: list[int]
    """Indices of its samples."""
    is_filler: bool
    """Whether another rank computes these samples, and this pass only keeps step: it counts nowhere."""


def deal(plan: Sequence[Sequence[int]], lengths: Sequence[int], rank: int, world: int) -> list[DealtPass]:
    """Return the passes of `rank`: of each round of `world` passes the one at its place.

    A plan is sorted by length, so the passes of one round cost alike. Where the last round has no pass for a rank, the rank
    computes the shortest sample once more.

    Args:
        plan: the passes of all ranks, as `sorted_microbatches` returns them.
        lengths: tokens of each sample.
        rank: from 0.
        world: number of ranks.

    Example:
        >>> [[each.samples for each in deal([[3], [1, 2], [0]], [5, 7, 6, 9], rank, 2)] for rank in (0, 1)]
        [[[3], [0]], [[1, 2], [0]]]
        >>> [each.is_filler for each in deal([[3], [1, 2], [0]], [5, 7, 6, 9], 1, 2)]
        [False, True]
    """
    if not plan:
        return []
    dealt = [DealtPass(list(samples), False) for samples in plan[rank::world]]
    rounds = -(-len(plan) // world)
    shortest = min((index for samples in plan for index in samples), key=lambda index: (lengths[index], index))
    return dealt + [DealtPass([shortest], True)] * (rounds - len(dealt))
