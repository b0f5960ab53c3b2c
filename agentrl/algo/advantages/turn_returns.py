"""Advantages of single turns: returns-to-go with a baseline from the other episodes of the group.

Invariant: the baseline of a turn's return depends neither on the turn's own action nor on where its own episode stopped, so
the expected policy gradient stays (Williams 1992, "Simple statistical gradient-following algorithms", theorem 1).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from agentrl.algo.advantages.parts import (
    Float64Array,
    PlayerPart,
    is_rounding,
    over_root_mean_square,
    part_of,
    players_of,
)
from agentrl.algo.slots import Bundled, row
from agentrl.config.base import Config
from agentrl.types import Group, Trajectory

TURN_ADVANTAGES: dict[str, Bundled] = {}


class TurnOptions(Config):
    """Options of `turn`."""

    discount: float = Field(default=1.0, gt=0, le=1)
    """Factor for each turn that was sent between a turn and a reward."""
    normalize_std: bool = False
    """Divide by the root mean square over all turns of the group."""


@row(TURN_ADVANTAGES, "turn", "G - mean of the other episodes' G at this depth, discount {discount}")
def turn(group: Group, options: TurnOptions) -> Sequence[Float64Array]:
    """A = G - b, with the return-to-go of turn t (ADR 28; below discount 1: Nota and Thomas, arXiv 1906.07073).

    G_t = sum over the rewards r set after t was sent of discount ** d(t, r) * r + discount ** d(t, end) * final_reward

    where d(t, r) is the number of turns that were sent after t and before r was set. b is the mean over the *other* episodes
    of a value at t's depth (the longest chain of turns, each sent when the one before was complete, that ends with t): the
    mean G of their turns at this depth, of the same declared branch where they have any, or at their deepest one if they
    ended earlier. Turns of two branches, of which neither holds the other, share neither rewards nor counts nor depths.
    """
    per_turn = _by_players(group, options.discount, lambda part, one: np.ones(len(part.at)))
    differences = np.concatenate(per_turn)
    return over_root_mean_square(per_turn, differences) if options.normalize_std and differences.any() else per_turn


class OptimalBaselineOptions(Config):
    """Options of `optimal_baseline`."""

    discount: float = Field(default=1.0, gt=0, le=1)
    """Factor for each turn that was sent between a turn and a reward."""


@row(TURN_ADVANTAGES, "optimal_baseline", "G - sum of the others' W G / sum of their W, W = sum of (1 - p)^2")
def optimal_baseline(group: Group, options: OptimalBaselineOptions) -> Sequence[Float64Array]:
    """A = G - sum of the others' W G / sum of their W, at each depth; W is the energy of the score up to the turn's end.

    The variance-optimal baseline weighs a return by the squared norm of the score (Greensmith et al. 2004, theorem 8); the
    "optimal token baseline" of verl takes for it the sum over tokens of 1 - 2 p + sum of p_v^2 over the vocabulary v. The
    driver has p of the sampled token alone, so the last sum is missing: W adds (1 - p)^2, its lower bound, over tokens. The
    own episode is left out, so nothing is biased whatever W is.
    """
    return _by_players(group, options.discount, _energy)


def returns_to_go(episode: Trajectory, discount: float) -> Float64Array:
    """Return G of every turn, [turns] float64."""
    to_go = np.empty(len(episode.turns), np.float64)
    for player in players_of([episode]):
        part = part_of(episode, player)
        to_go[part.at] = _part_returns_to_go(part, discount)
    return to_go


def _by_players(
    group: Group, discount: float, weigh: Callable[[PlayerPart, Trajectory], Float64Array]
) -> list[Float64Array]:
    """Return G - b of every turn, or exact zeros where all are 0 up to rounding."""
    result = [np.zeros(len(one.turns)) for one in group.episodes]
    if len(group.episodes) == 1:
        return result
    all_returns: list[Float64Array] = []
    for player in players_of(group.episodes):
        parts = [part_of(one, player) for one in group.episodes]
        to_go = [_part_returns_to_go(part, discount) for part in parts]
        weights = [weigh(part, one) for part, one in zip(parts, group.episodes, strict=True)]
        differences = _subtract_other_episodes(parts, to_go, weights)
        for values, part, difference in zip(result, parts, differences, strict=True):
            values[part.at] = difference
        all_returns += to_go
    if is_rounding(np.concatenate(result), np.concatenate(all_returns)):
        return [np.zeros_like(values) for values in result]
    return result


def _energy(part: PlayerPart, episode: Trajectory) -> Float64Array:
    own = [float(((1 - np.exp(episode.turns[at].output_logprobs.astype(np.float64))) ** 2).sum()) for at in part.at.tolist()]
    order = np.argsort(part.sent_at, kind="stable")
    result = np.empty(len(own))
    result[order] = np.cumsum(np.array(own)[order]) if own else 0.0
    return result


def _part_returns_to_go(part: PlayerPart, discount: float) -> Float64Array:
    to_go = np.empty(len(part.at), np.float64)
    for index, sent_at in enumerate(part.sent_at.tolist()):
        related = part.related[index]
        later = np.sort(part.sent_at[related & (part.sent_at > sent_at)])
        credited = related[part.earners] & (part.rewarded_at > sent_at)
        exponents = np.searchsorted(later, part.rewarded_at[credited])
        to_go[index] = discount**exponents @ part.rewards[credited] + discount ** len(later) * part.final
    return to_go


def _subtract_other_episodes(
    parts: Sequence[PlayerPart], to_go: Sequence[Float64Array], weights: Sequence[Float64Array]
) -> list[Float64Array]:
    """Return G - b of every turn; `weights` are those of the turns in b, all 1 for a plain mean."""
    depths = [np.array(_depths(part), np.intp) for part in parts]
    count = 1 + max((int(depth.max()) for depth in depths if len(depth)), default=0)
    result = [np.empty_like(returns) for returns in to_go]
    for branch in dict.fromkeys(branch for part in parts for branch in part.branches):
        places = [np.array([one == branch for one in part.branches], np.bool_) for part in parts]
        values, masses = np.empty((len(parts), count)), np.empty((len(parts), count))
        for at, (part, depth) in enumerate(zip(parts, depths, strict=True)):
            here = places[at] if places[at].any() else slice(None)
            weighted = weights[at][here] * to_go[at][here]
            values[at] = _value_by_depth(depth[here], weighted, count, empty=part.final)
            masses[at] = _value_by_depth(depth[here], weights[at][here], count, empty=1.0)
        for at, (depth, returns) in enumerate(zip(depths, to_go, strict=True)):
            # Summed over the others, not "all minus own": the own value must not enter even by rounding.
            mass = np.delete(masses, at, axis=0).sum(axis=0)
            baseline = np.delete(values, at, axis=0).sum(axis=0) / np.where(mass > 0, mass, 1.0)
            result[at][places[at]] = returns[places[at]] - baseline[depth[places[at]]]
    return result


def _value_by_depth(depths: NDArray[np.intp], returns: Float64Array, count: int, *, empty: float) -> Float64Array:
    """Return the mean return-to-go at each depth; a gap takes the next lower depth's, else the lowest's, else `empty`."""
    if not len(depths):
        return np.full(count, empty)
    present, at = np.unique(depths, return_inverse=True)
    means = np.bincount(at, weights=returns) / np.bincount(at)
    return means[np.maximum(np.searchsorted(present, np.arange(count), side="right") - 1, 0)]


def _depths(part: PlayerPart) -> list[int]:
    depths: list[int] = []
    for index, sent_after in enumerate(part.sent_after.tolist()):
        before = np.flatnonzero(part.related[index, :sent_after]).tolist()
        depths.append(1 + max((depths[each] for each in before), default=-1))
    return depths
