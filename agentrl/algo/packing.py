"""Plans which samples share a forward pass or an optimizer step, and which rank computes a pass. numpy only.

Invariant: a plan is a list of lists of sample indices that holds each whole sample exactly once; a list exceeds the token
budget only if it holds a single longer sample. Packing never changes the loss, which is a sum over tokens. All ranks compute
the same number of passes, so none waits in a collective that another never enters.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


def sorted_microbatches(lengths: Sequence[int], max_tokens: int, *, overhead_tokens: int = 64) -> list[list[int]]:
    """Return the right-padded microbatches with the least total cost, longest first, of at most `max_tokens` padded tokens.

    The cost of a microbatch of B samples, the longest of L tokens, is B * L + overhead_tokens, the fixed cost of a pass in
    tokens. A sample over the budget gets its own microbatch.

    Example:
        >>> sorted_microbatches([4, 90, 5, 100], max_tokens=200, overhead_tokens=16)
        [[3, 1], [2, 0]]
    """
    if max_tokens < 1 or min(lengths, default=1) < 1:
        raise ValueError(
            f"expected max_tokens and every length to be at least 1, got max_tokens={max_tokens}, lengths={list(lengths)}"
        )
    if overhead_tokens < 0:
        raise ValueError(f"expected overhead_tokens of at least 0, got {overhead_tokens}")
    order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    sizes = np.array([lengths[index] for index in order], np.int64)
    count = len(order)
    best = np.zeros(count + 1, np.int64)
    cut = np.empty(count, np.int64)
    for first in range(count - 1, -1, -1):
        most = min(max(max_tokens // int(sizes[first]), 1), count - first)
        costs = int(sizes[first]) * np.arange(1, most + 1) + best[first + 1 : first + most + 1]
        cheapest = int(costs.argmin())
        best[first] = costs[cheapest] + overhead_tokens
        cut[first] = first + cheapest + 1
    plan: list[list[int]] = []
    first = 0
    while first < count:
        plan.append(order[first : int(cut[first])])
        first = int(cut[first])
    return plan


def split_minibatches(loss_tokens: Sequence[int], n: int, *, seed: tuple[int, ...]) -> list[list[int]]:
    """Return at most `n` minibatches with about equal loss tokens, each with at least one; indices ascend within each.

    The samples are shuffled by `seed` (of the run, the step and a later pass); each then goes to the minibatch with the
    fewest loss tokens so far, then with the fewest samples (list scheduling: Graham 1966, "Bounds for certain
    multiprocessing anomalies"). There are none when no sample has loss tokens.

    Example:
        >>> split_minibatches([5, 3, 0, 4], n=2, seed=(0, 1))
        [[1, 2, 3], [0]]
    """
    if n < 1 or min(loss_tokens, default=0) < 0:
        raise ValueError(f"expected n of at least 1 and counts of at least 0, got n={n}, loss_tokens={list(loss_tokens)}")
    count = min(n, sum(tokens > 0 for tokens in loss_tokens))
    if not count:
        return []
    minibatches: list[list[int]] = [[] for _ in range(count)]
    lightest = [(0, 0, which) for which in range(count)]
    for index in np.random.default_rng(seed).permutation(len(loss_tokens)).tolist():
        tokens, samples, which = heapq.heappop(lightest)
        minibatches[which].append(index)
        heapq.heappush(lightest, (tokens + loss_tokens[index], samples + 1, which))
    return [sorted(minibatch) for minibatch in minibatches]


class DealtPass(NamedTuple):
    """One forward pass of a rank."""

    samples: list[int]
    is_filler: bool
    """Another rank computes these samples; this pass only keeps step and counts nowhere."""


def deal(plan: Sequence[Sequence[int]], lengths: Sequence[int], rank: int, world: int) -> list[DealtPass]:
    """Return the passes of `rank`: its own of each round of `world` passes of `plan`, or the shortest sample again."""
    if not plan:
        return []
    dealt = [DealtPass(list(samples), False) for samples in plan[rank::world]]
    rounds = -(-len(plan) // world)
    shortest = min((index for samples in plan for index in samples), key=lambda index: (lengths[index], index))
    return dealt + [DealtPass([shortest], True)] * (rounds - len(dealt))
