"""Advantage of each turn, from the rewards of a group of episodes. numpy only: this runs in the driver.

Invariant: what is subtracted from a turn's return never depends on that turn's own action, nor on where its own episode
stopped, so the expected policy gradient stays (Williams 1992, "Simple statistical gradient-following algorithms", theorem
1). `episode` alone subtracts a mean that includes the episode itself, which scales the expected gradient by (g - 1) / g, g =
`group_size`. A group whose returns equal their baselines gets exactly 0. No result is NaN or infinite.

`episode`: A = R - mean of the group's R, for every turn; R is the undiscounted return. It is REINFORCE leave-one-out
(Ahmadian et al., arXiv 2402.14740) times (n - 1) / n, and GRPO (Shao et al., arXiv 2402.03300, section 4.1.2) without the
division (Liu et al., arXiv 2503.20783, section 3.1). A group kept with n < g episodes is multiplied by n / (n - 1) * (g - 1)
/ g.

`turn`: A = G - b, with the return-to-go of turn t (ADR 28; below discount 1: Nota and Thomas, arXiv 1906.07073)

    G_t = sum over the rewards r set after t was sent of discount ** d(t, r) * r + discount ** d(t, end) * final_reward

where d(t, r) is the number of turns that were sent after t and before r was set. b is the mean over the *other* episodes of
a value at t's depth (the longest chain of turns, each sent when the one before was complete, that ends with t): the mean G
of their turns at this depth, of the same declared branch where they have any, or at their deepest one if they ended earlier.
Turns of two branches, of which neither holds the other, share neither rewards nor counts nor depths.

`Trajectory.advantage`, from `score_group`, goes to each turn as it is (ADR 15). Each player's part of an episode
(`Turn.player`) counts as an episode; all share the final reward (ADR 16).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from agentrl.algo.config import AlgorithmConfig
from agentrl.episode.checks import MAX_REWARD, are_independent, check_reward_time
from agentrl.errors import InvariantError
from agentrl.types import BoolArray, BranchPath, Float32Array, Group, Sample, Trajectory

Float64Array: TypeAlias = NDArray[np.float64]
Int64Array: TypeAlias = NDArray[np.int64]

EQUAL = 1e-9
"""Advantages up to this part of the group's largest absolute return are rounding: taken as 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupAdvantages:
    """The advantages of one group."""

    per_turn: tuple[Float64Array, ...]
    """For each episode: [turns] float64, indexed like `Trajectory.turns`."""
    zero_variance: bool
    """True when every advantage is exactly 0."""


def advantages(group: Group, config: AlgorithmConfig) -> GroupAdvantages:
    """Return the advantage of every turn of every episode of `group`, by the estimator `config.advantage` names.

    With `config.normalize_std` they are divided by their root mean square: over episodes and players for `episode`, over all
    turns of the group for `turn`. A group left with one episode has zero variance.

    Raises:
        InvariantError: an episode failed, has no reward or only some of the advantages, or its turns are out of order.
    """
    where = f"group {group.index}, task {group.task.id!r}"
    if not group.episodes:
        raise InvariantError(f"{where}: expected at least one episode, got none")
    for episode in group.episodes:
        _check_episode(episode, where)
    if any(episode.advantage is not None for episode in group.episodes):
        return _given_advantages(group, where)
    per_turn = [np.zeros(len(episode.turns)) for episode in group.episodes]
    compared: list[Float64Array] = []
    largest_return = 0.0
    for player in _players(group.episodes):
        parts = [_part_of(episode, player) for episode in group.episodes]
        estimate = _episode_differences if config.advantage == "episode" else _turn_differences
        returns, differences, values = estimate(parts, config)
        for turns, part, value in zip(per_turn, parts, values, strict=True):
            turns[part.at] = value
        compared.append(differences)
        largest_return = max(largest_return, float(np.abs(returns).max(initial=0.0)))
    differences = np.concatenate(compared)
    largest = float(np.abs(differences).max(initial=0.0))
    if len(group.episodes) == 1 or largest <= EQUAL * largest_return:
        return GroupAdvantages(per_turn=tuple(np.zeros(len(e.turns)) for e in group.episodes), zero_variance=True)
    if config.normalize_std:
        # Scaled by the largest first: squares of tiny or huge rewards would leave the range of a float.
        root_mean_square = math.sqrt(_exact_mean((differences / largest) ** 2))
        per_turn = [values / largest / root_mean_square for values in per_turn]
    return GroupAdvantages(per_turn=tuple(per_turn), zero_variance=False)


def _given_advantages(group: Group, where: str) -> GroupAdvantages:
    per_turn: list[Float64Array] = []
    for episode in group.episodes:
        given = episode.advantage
        if given is None or not abs(given) <= MAX_REWARD:
            raise InvariantError(
                f"{where}, episode {episode.episode_id!r}: expected a finite advantage, as other episodes of the group "
                f"have, got {given}; score_group gives advantages to all members or to none"
            )
        per_turn.append(np.full(len(episode.turns), given))
    return GroupAdvantages(per_turn=tuple(per_turn), zero_variance=not any(values.any() for values in per_turn))


def returns_to_go(episode: Trajectory, discount: float) -> Float64Array:
    """Return G of every turn, [turns] float64."""
    to_go = np.empty(len(episode.turns), np.float64)
    for player in _players([episode]):
        part = _part_of(episode, player)
        to_go[part.at] = _returns_to_go(part, discount)
    return to_go


@dataclass(frozen=True, slots=True)
class _PlayerPart:
    """The turns of one player in an episode, [n] each; all int64 but rewards, float64."""

    at: Int64Array
    """Index among all turns."""
    rewards: Float64Array
    """0 where a turn has none."""
    sent_after: Int64Array
    """Number of its own turns that were complete when the request was sent."""
    sent_at: Int64Array
    rewarded_at: Int64Array
    """-1 where there is none."""
    branches: Sequence[BranchPath]
    related: BoolArray
    """[n, n]: whether no declared branch holds the one turn and not the other."""
    final: float


def _players(episodes: Sequence[Trajectory]) -> list[str]:
    return list(dict.fromkeys(turn.player for episode in episodes for turn in episode.turns)) or [""]


def _part_of(episode: Trajectory, player: str) -> _PlayerPart:
    at = np.array([index for index, turn in enumerate(episode.turns) if turn.player == player], np.int64)
    turns = [episode.turns[index] for index in at.tolist()]
    branches = [turn.branch for turn in turns]
    return _PlayerPart(
        at=at,
        rewards=np.array([turn.reward or 0.0 for turn in turns], np.float64),
        sent_after=np.searchsorted(at, np.array([turn.sent_after for turn in turns], np.int64)),
        sent_at=np.array([turn.sent_at for turn in turns], np.int64),
        rewarded_at=np.array([-1 if turn.rewarded_at is None else turn.rewarded_at for turn in turns], np.int64),
        branches=branches,
        related=_related(branches),
        final=episode.final_reward or 0.0,
    )


def _episode_differences(
    parts: Sequence[_PlayerPart], config: AlgorithmConfig
) -> tuple[Float64Array, Float64Array, Sequence[Float64Array]]:
    """Return the returns, [episodes], their differences from the baselines, and the latter for each turn."""
    returns = np.array([math.fsum(part.rewards) + part.final for part in parts])
    centered = (returns - _exact_mean(returns)) * _short_group_scale(len(returns), config.group_size)
    return returns, centered, [np.full(len(part.at), value) for part, value in zip(parts, centered, strict=True)]


def _turn_differences(
    parts: Sequence[_PlayerPart], config: AlgorithmConfig
) -> tuple[Float64Array, Float64Array, Sequence[Float64Array]]:
    """Return the same for the returns-to-go of all turns, [turns of all episodes]."""
    to_go = [_returns_to_go(part, config.discount) for part in parts]
    per_turn = _subtract_other_episodes(parts, to_go)
    return np.concatenate(to_go), np.concatenate(per_turn), per_turn


def _returns_to_go(part: _PlayerPart, discount: float) -> Float64Array:
    to_go = np.empty(len(part.rewards), np.float64)
    for index, sent_at in enumerate(part.sent_at.tolist()):
        related = part.related[index]
        later = np.sort(part.sent_at[related & (part.sent_at > sent_at)])
        credited = related & (part.rewarded_at > sent_at)
        exponents = np.searchsorted(later, part.rewarded_at[credited])
        to_go[index] = discount**exponents @ part.rewards[credited] + discount ** len(later) * part.final
    return to_go


def _related(branches: Sequence[BranchPath]) -> BoolArray:
    if not any(branches):
        return np.ones((len(branches), len(branches)), np.bool_)
    return np.array([[not are_independent(one, other) for other in branches] for one in branches], np.bool_)


def token_advantages(sample: Sample, per_turn: Float64Array) -> Float32Array:
    """Return each token's advantage, [L] float32, 0 outside `loss_mask`; `per_turn` is its episode's, [turns] float64."""
    if len(sample.turn_index) and not 0 <= sample.turn_index.min() <= sample.turn_index.max() < len(per_turn):
        raise InvariantError(
            f"expected turn indices below {len(per_turn)}, one advantage per turn, got up to {sample.turn_index.max()}; "
            "the advantages are another episode's"
        )
    if not len(per_turn):
        return np.zeros(len(sample.loss_mask), np.float32)
    return np.where(sample.loss_mask, per_turn[sample.turn_index], 0.0).astype(np.float32)


def _subtract_other_episodes(parts: Sequence[_PlayerPart], to_go: Sequence[Float64Array]) -> list[Float64Array]:
    """Return G - b of every turn."""
    depths = [np.array(_depths(part), np.intp) for part in parts]
    count = 1 + max((int(depth.max()) for depth in depths if len(depth)), default=0)
    result = [np.empty_like(returns) for returns in to_go]
    for branch in dict.fromkeys(branch for part in parts for branch in part.branches):
        places = [np.array([one == branch for one in part.branches], np.bool_) for part in parts]
        values = np.empty((len(parts), count))
        for row, (part, depth, returns) in enumerate(zip(parts, depths, to_go, strict=True)):
            here = places[row] if places[row].any() else slice(None)
            values[row] = _value_by_depth(depth[here], returns[here], count, empty=part.final)
        for row, (depth, returns) in enumerate(zip(depths, to_go, strict=True)):
            # Summed over the others, not "all minus own": the own value must not enter even by rounding.
            baseline = np.delete(values, row, axis=0).sum(axis=0) / max(len(parts) - 1, 1)
            result[row][places[row]] = returns[places[row]] - baseline[depth[places[row]]]
    return result


def _short_group_scale(episodes: int, group_size: int) -> float:
    if not 1 < episodes < group_size:
        return 1.0
    return episodes / (episodes - 1) * (group_size - 1) / group_size


def _value_by_depth(depths: NDArray[np.intp], returns: Float64Array, count: int, *, empty: float) -> Float64Array:
    """Return the mean return-to-go at each depth; a gap takes the next lower depth's, else the lowest's, else `empty`."""
    if not len(depths):
        return np.full(count, empty)
    present, at = np.unique(depths, return_inverse=True)
    means = np.bincount(at, weights=returns) / np.bincount(at)
    return means[np.maximum(np.searchsorted(present, np.arange(count), side="right") - 1, 0)]


def _depths(part: _PlayerPart) -> list[int]:
    depths: list[int] = []
    for index, sent_after in enumerate(part.sent_after.tolist()):
        before = np.flatnonzero(part.related[index, :sent_after]).tolist()
        depths.append(1 + max((depths[each] for each in before), default=-1))
    return depths


def _check_episode(episode: Trajectory, where: str) -> None:
    where = f"{where}, episode {episode.episode_id!r}"
    if episode.failure is not None:
        raise InvariantError(
            f"{where}: a failed episode ({episode.failure.kind}) has no return and must not reach the advantages; "
            "the group is completed or dropped before"
        )
    rewards = [turn.reward for turn in episode.turns if turn.reward is not None]
    if episode.final_reward is not None:
        rewards.append(episode.final_reward)
    if not rewards:
        raise InvariantError(f"{where}: no turn has a reward and there is no final one; it would be trained as 0")
    for reward in rewards:
        if not abs(reward) <= MAX_REWARD:
            raise InvariantError(f"{where}: expected finite rewards of at most {MAX_REWARD:g}, got {reward}")
    for index, turn in enumerate(episode.turns):
        if not 0 <= turn.sent_after <= index:
            raise InvariantError(f"{where}: turn {index} was sent after {turn.sent_after} turns; expected 0 to {index}")
        if turn.parent is not None and not 0 <= turn.parent < turn.sent_after:
            raise InvariantError(
                f"{where}: turn {index}, sent after {turn.sent_after} turns, has parent {turn.parent}; expected a turn that "
                "was complete when the request was sent"
            )
        check_reward_time(turn, f"{where}, turn {index}")


def _exact_mean(values: Float64Array) -> float:
    return math.fsum(values) / len(values)
