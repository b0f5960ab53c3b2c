"""Plans forward passes in which sequences share the computation of their common prefixes. numpy only.

A pass is a tree of tokens: a token stands once for all sequences that agree up to it. Its tokens lie in one row, run by
run; a run is the part of a sequence that no earlier one has, so a pass of n sequences has at most n runs.

Invariant: a token of the row attends to exactly the tokens before it in its own sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from agentrl.algo.packing import sorted_microbatches
from agentrl.types import Int32Array

LEAST_SAVED = 0.2
"""Part of the tokens of plain passes that shared ones must save, to pay for attention by runs."""


@dataclass(frozen=True, slots=True)
class TokenRun:
    """The tokens `start` to `stop` of the row, which follow the tokens of `prefix`."""

    start: int
    stop: int
    prefix: tuple[tuple[int, int], ...]
    """Parts of the row, each from a start to a stop, in the order of the sequence."""


@dataclass(frozen=True, slots=True)
class TokenTree:
    """Sequences of one pass with their common prefixes joined; N tokens."""

    token_ids: Int32Array
    """[N]"""
    depths: Int32Array
    """[N] place of each token in its sequences."""
    runs: tuple[TokenRun, ...]
    places: tuple[NDArray[np.int64], ...]
    """[L] for each sequence: where its tokens stand in the row."""

    @property
    def ends(self) -> NDArray[np.int64]:
        """[N]: where the part of the row ends whose tokens follow this one; those of its sequences stand in one piece."""
        ends = np.arange(1, len(self.token_ids) + 1)
        for where in self.places:
            if len(where):
                ends[where] = np.maximum(ends[where], where[-1] + 1)
        return ends


def token_tree(sequences: Sequence[Int32Array]) -> TokenTree:
    """Return the tree of `sequences`, [L] int32 each.

    Example:
        >>> tree = token_tree([np.array([1, 2, 3], np.int32), np.array([1, 2, 4, 5], np.int32)])
        >>> tree.token_ids.tolist(), tree.depths.tolist(), tree.runs[1]
        ([1, 2, 3, 4, 5], [0, 1, 2, 2, 3], TokenRun(start=3, stop=5, prefix=((0, 2),)))
    """
    order = _prefix_order(sequences)
    shared = _shared_with_previous([sequences[at] for at in order])
    places: list[NDArray[np.int64]] = [np.empty(0, np.int64)] * len(sequences)
    path, size, runs = np.empty(0, np.int64), 0, list[TokenRun]()
    for at, common in zip(order, shared, strict=True):
        own = len(sequences[at]) - common
        path = np.concatenate([path[:common], np.arange(size, size + own)])
        places[at] = path
        if own:
            runs.append(TokenRun(size, size + own, _parts(path[:common])))
        size += own
    token_ids, depths = np.empty(size, np.int32), np.empty(size, np.int32)
    for ids, where in zip(sequences, places, strict=True):
        token_ids[where] = ids
        depths[where] = np.arange(len(ids))
    return TokenTree(token_ids, depths, tuple(runs), tuple(places))


@dataclass(frozen=True, slots=True)
class PassPlan:
    """Which sequences share a pass, by their indices."""

    passes: list[list[int]]
    shared: bool
    """Whether a pass is a tree of tokens; otherwise it is a padded rectangle."""


def plan_passes(sequences: Sequence[Int32Array], max_tokens: int, *, share: bool, overhead_tokens: int = 64) -> PassPlan:
    """Return passes of at most `max_tokens` tokens each; trees, if `share` and they save `LEAST_SAVED` of the tokens.

    A tree of n sequences costs its tokens and `overhead_tokens`, a rectangle its padded tokens and as many. A sequence
    over the budget gets a pass of its own.

    Example:
        >>> many = [np.array([*range(90), last], np.int32) for last in (1, 2, 3)]
        >>> plan_passes(many, 256, share=True), plan_passes(many, 256, share=False).passes
        (PassPlan(passes=[[0, 1, 2]], shared=True), [[0, 1], [2]])
    """
    lengths = [len(ids) for ids in sequences]
    plain = sorted_microbatches(lengths, max_tokens, overhead_tokens=overhead_tokens) if lengths else []
    if not share or len(sequences) < 2:
        return PassPlan(plain, shared=False)
    order = _prefix_order(sequences)
    common = _shared_with_previous([sequences[at] for at in order])
    if sum(common) < LEAST_SAVED * sum(lengths):
        return PassPlan(plain, shared=False)
    passes, cost = _cheapest_trees([lengths[at] for at in order], common, max_tokens, overhead_tokens)
    plain_cost = sum(max(lengths[at] for at in one) * len(one) + overhead_tokens for one in plain)
    if cost > (1 - LEAST_SAVED) * plain_cost:
        return PassPlan(plain, shared=False)
    return PassPlan([[order[at] for at in one] for one in passes], shared=True)


def _cheapest_trees(
    lengths: Sequence[int], common: Sequence[int], max_tokens: int, overhead_tokens: int
) -> tuple[list[range], int]:
    """Return the cheapest cut of sequences in the order of their prefixes into trees, largest first, and its cost."""
    count = len(lengths)
    best, cut = [0] * (count + 1), [0] * count
    for first in range(count - 1, -1, -1):
        size, best[first] = 0, -1
        for stop in range(first + 1, count + 1):
            size += lengths[stop - 1] - (common[stop - 1] if stop - 1 > first else 0)
            if size > max_tokens and stop > first + 1:
                break
            cost = size + overhead_tokens + best[stop]
            if best[first] < 0 or cost < best[first]:
                best[first], cut[first] = cost, stop
    passes, first = list[range](), 0
    while first < count:
        passes.append(range(first, cut[first]))
        first = cut[first]
    sizes = {one: sum(lengths[at] - (common[at] if at > one.start else 0) for at in one) for one in passes}
    return sorted(passes, key=lambda one: (-sizes[one], one.start)), best[0]


def _prefix_order(sequences: Sequence[Int32Array]) -> list[int]:
    """Return an order in which each sequence follows one that has the longest prefix in common with it."""
    keys = [ids.astype(">u4").tobytes() for ids in sequences]
    return sorted(range(len(sequences)), key=lambda at: (keys[at], at))


def _shared_with_previous(ordered: Sequence[Int32Array]) -> list[int]:
    """Return for each of `ordered` the length of the prefix that it has in common with the one before it."""
    shared = [0] * len(ordered)
    for at in range(1, len(ordered)):
        first, second = ordered[at - 1], ordered[at]
        most = min(len(first), len(second))
        differs = np.flatnonzero(first[:most] != second[:most])
        shared[at] = int(differs[0]) if len(differs) else most
    return shared


def _parts(path: NDArray[np.int64]) -> tuple[tuple[int, int], ...]:
    if not len(path):
        return ()
    starts = np.flatnonzero(np.diff(path, prepend=path[0] - 2) != 1)
    stops = [*starts[1:].tolist(), len(path)]
    return tuple((int(path[a]), int(path[b - 1]) + 1) for a, b in zip(starts.tolist(), stops, strict=True))
