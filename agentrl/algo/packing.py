"""Plans which samples share a forward pass or an optimizer step, and which rank computes a pass. numpy only.

Invariant: a plan is a list of lists of sample indices that holds each whole sample exactly once. A list exceeds the token
budget only if it holds a single sample that is longer. The same input always gives the same plan. Packing changes speed and
memory, never the loss, which is a sum over tokens (`agentrl.algo.loss`). All ranks compute the same number of passes, so
that none waits in a collective that another never enters.

Sequences are padded on the right: under causal attention no real token attends to the padding after it, so the result is
exact without an attention mask. Sorting by length keeps the padding small (under 6 % of a batch of lognormal lengths).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


def sorted_microbatches(lengths: Sequence[int], max_tokens: int, *, overhead_tokens: int = 64) -> list[list[int]]:
    """Return the right-padded microbatches with the least total cost, longest first.

    The cost of a microbatch of B samples, the longest of L tokens, is B * L + overhead_tokens. Samples sorted by length
    are cut into consecutive runs by dynamic programming, which is optimal for this cost: swapping two samples between
    microbatches so that the longer ones stand together never makes either longest sample longer.
    O(n * k) for n samples, at most k of them in a microbatch.

    Args:
        lengths: tokens of each sample, at least 1.
        max_tokens: budget of one microbatch, padding included; a longer sample gets a microbatch of its own.
        overhead_tokens: fixed cost of one forward and backward pass, in tokens; 0 forbids all padding. 64 is within 7 %
            of the best on a CPU core from 0.1M to 5M parameters; 256 is up to 17 % slower.

    Raises:
        ValueError: for a length or budget below 1, or a negative overhead.

    Example:
        >>> sorted_microbatches([4, 90, 5, 100], max_tokens=200, overhead_tokens=16)
        [[3, 1], [2, 0]]
    """
    _check_sizes(lengths, max_tokens, "max_tokens")
    if overhead_tokens < 0:
        raise ValueError(f"expected overhead_tokens of at least 0, got {overhead_tokens}")
    order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    sizes = np.array([lengths[index] for index in order], np.int64)
    count = len(order)
    best = np.zeros(count + 1, np.int64)
    """best[i]: least cost of order[i:]."""
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


def split_minibatches(loss_tokens: Sequence[int], n: int, *, seed: tuple[int, int]) -> list[list[int]]:
    """Return at most `n` minibatches with about equal loss tokens, each with at least one; indices ascend within each.

    The samples are shuffled by `seed`; each then goes to the minibatch with the fewest loss tokens so far, then with the
    fewest samples (list scheduling: Graham 1966, "Bounds for certain multiprocessing anomalies"). So neither its group nor
    its length decides which minibatch a sample is in, and two minibatches differ by at most the largest sample. There are
    fewer than `n` when fewer samples have loss tokens, and none when no sample has any: then there is nothing to train.

    Args:
        loss_tokens: loss tokens of each sample.
        n: minibatches wanted, at least 1.
        seed: the seed of the run and the number of the step, so that a resumed run shuffles alike.

    Raises:
        ValueError: for `n` below 1 or a negative count.

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


def _check_sizes(lengths: Sequence[int], budget: int, name: str) -> None:
    if budget < 1 or min(lengths, default=1) < 1:
        raise ValueError(f"expected {name} and every length to be at least 1, got {name}={budget}, lengths={list(lengths)}")
