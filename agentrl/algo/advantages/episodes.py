"""Advantages from the returns of whole episodes: one number for all turns of a player in an episode.

Invariant: equal returns have advantages of exactly 0, except under `reinforce_plus_plus`, whose baseline is the batch. R is
the undiscounted return, n the number of episodes in the group.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
from pydantic import Field

from agentrl.algo.advantages.parts import (
    Float64Array,
    exact_mean,
    is_rounding,
    over_root_mean_square,
    part_of,
    players_of,
)
from agentrl.algo.slots import Bundled, NoOptions, row
from agentrl.config.base import Config
from agentrl.types import Float32Array, Group, Trajectory

EPISODE_ADVANTAGES: dict[str, Bundled] = {}


class EpisodeOptions(Config):
    """Options of `episode`."""

    group_size: int | None = Field(default=None, ge=1)
    """Episodes of a whole group, `algorithm.group_size`; scales the advantages of a group that lost members."""
    normalize_std: bool = False
    """Divide by the root mean square over the episodes and players of the group."""


@row(EPISODE_ADVANTAGES, "episode", "R - mean of the group's R")
def episode(group: Group, options: EpisodeOptions) -> Sequence[Float64Array]:
    """A = R - mean of the group's R.

    It is `rloo` times (n - 1) / n, and GRPO without the division (arXiv 2503.20783, section 3.1). A group kept with n of
    `group_size` = g episodes is multiplied by n / (n - 1) * (g - 1) / g.
    """
    scale = _short_group_scale(len(group.episodes), options.group_size)
    returns = _returns(group)
    centered = {player: (each - exact_mean(each)) * scale for player, each in returns.items()}
    together = np.concatenate([*centered.values()])
    if is_rounding(together, np.concatenate([*returns.values()])):
        return _per_turn(group, {player: np.zeros_like(each) for player, each in centered.items()})
    return (
        over_root_mean_square(_per_turn(group, centered), together) if options.normalize_std else _per_turn(group, centered)
    )


class GrpoOptions(Config):
    """Options of `grpo`."""

    epsilon: float = Field(default=1e-6, ge=0)
    """Added to the standard deviation."""


@row(EPISODE_ADVANTAGES, "grpo", "(R - mean) / (std + {epsilon})")
def grpo(group: Group, options: GrpoOptions) -> Sequence[Float64Array]:
    """A = (R - mean) / (std + epsilon), std over n - 1 (Shao et al., arXiv 2402.03300, section 4.1.2)."""

    def rule(returns: Float64Array) -> Float64Array:
        largest = float(np.abs(returns).max())
        centered = returns / largest - exact_mean(returns / largest)
        deviation = math.sqrt(math.fsum(centered**2) / (len(returns) - 1))
        return centered / (deviation + options.epsilon / largest)

    return _by_returns(group, rule)


@row(EPISODE_ADVANTAGES, "dr_grpo", "R - mean")
def dr_grpo(group: Group, options: NoOptions) -> Sequence[Float64Array]:
    """A = R - mean (Liu et al., arXiv 2503.20783, section 3.2); the aggregate `fixed` belongs to it."""
    return _by_returns(group, lambda returns: returns - exact_mean(returns))


@row(EPISODE_ADVANTAGES, "rloo", "R - mean of the others' R")
def rloo(group: Group, options: NoOptions) -> Sequence[Float64Array]:
    """A = R - mean of the other episodes' R (Ahmadian et al., arXiv 2402.14740, RLOO)."""

    def rule(returns: Float64Array) -> Float64Array:
        others = [exact_mean(np.delete(returns, at)) for at in range(len(returns))]
        return returns - np.array(others)

    return _by_returns(group, rule)


class ReinforcePlusPlusOptions(Config):
    """Options of `reinforce_plus_plus`."""

    baseline: Literal["none", "group"] = "none"
    """`group` subtracts the mean of the group before the batch is normalized."""


@row(
    EPISODE_ADVANTAGES,
    "reinforce_plus_plus",
    "(R - baseline {baseline} - mean of the batch) / std of the batch",
    needs=("batch",),
)
def reinforce_plus_plus(group: Group, options: ReinforcePlusPlusOptions) -> Sequence[Float64Array]:
    """A = R, or R - mean; `whiten` then normalizes the batch (Hu et al., arXiv 2501.03262, section 3)."""
    if options.baseline == "group":
        return dr_grpo(group, NoOptions())
    return _per_turn(group, _returns(group))


@row(EPISODE_ADVANTAGES, "max_rl", "(R - mean) / mean, 0 where mean <= 0")
def max_rl(group: Group, options: NoOptions) -> Sequence[Float64Array]:
    """A = (R - mean) / mean, 0 where mean <= 0; for rewards of 0 and 1 (Tajwar et al., arXiv 2602.02710, algorithm 1).

    With success probability p it climbs -sum over k from 1 to n - 1 of (1 - p)^k / k, which tends to log p.
    """

    def rule(returns: Float64Array) -> Float64Array:
        mean = exact_mean(returns)
        return (returns - mean) / mean if mean > 0 else np.zeros_like(returns)

    return _by_returns(group, rule)


class PassAtKOptions(Config):
    """Options of `pass_at_k`."""

    k: int = Field(default=2, ge=2)
    """Attempts that are graded together by their best; at most the episodes of a group."""


@row(
    EPISODE_ADVANTAGES,
    "pass_at_k",
    "n * mean over sets of {k} of (max of the set - max without this episode), for sets with it",
)
def best_of_k(group: Group, options: PassAtKOptions) -> Sequence[Float64Array]:
    """A = n / C(n, k) * sum over the sets of k episodes with this one of (max R - max R of the rest of the set).

    Climbs the expected best of k episodes (Walder and Karkhanis, arXiv 2505.15201, `s^(loo-1)`). The rest of a set does not
    depend on this episode, so nothing is biased. A group with fewer than k episodes learns nothing.
    """
    count, k = len(group.episodes), options.k

    def rule(returns: Float64Array) -> Float64Array:
        if k > count:
            return np.zeros(count)
        order = np.argsort(returns, kind="stable")
        ascending = returns[order]
        result = np.empty(count)
        for rank in range(count):
            best = ascending[rank] * math.comb(rank, k - 1)
            best += math.fsum(ascending[j] * math.comb(j - 1, k - 2) for j in range(rank + 1, count))
            rest = math.fsum(value * math.comb(j, k - 2) for j, value in enumerate(np.delete(ascending, rank)))
            result[order[rank]] = (best - rest) * count / math.comb(count, k)
        return result

    return _by_returns(group, rule)


class OffPolicyOptions(Config):
    """Options of `off_policy_baseline`."""

    leave_one_out: bool = False
    """Leave an episode out of its own baseline: nothing is biased, and one that outweighs the others keeps its noise."""
    normalize_std: bool = False
    """Divide by the standard deviation of the group's returns, over n."""


@row(
    EPISODE_ADVANTAGES,
    "off_policy_baseline",
    "R - sum of W^2 g R / sum of W^2 g, W = current / behavior of the episode, g = sum of (1 - p)^2",
    needs=("logprobs",),
)
def off_policy_baseline(
    group: Group, options: OffPolicyOptions, logprobs: Sequence[Sequence[Float32Array]]
) -> Sequence[Float64Array]:
    """A = R - b, b = sum of W^2 g R / sum of W^2 g over the group (VCPO, arXiv 2602.17616: least variance off policy).

    W is current / behavior of all tokens of an episode. The authors' g is the squared norm of the gradient of its log-prob;
    here it is the sum of (1 - p)^2 over its tokens, as in `optimal_baseline`. `logprobs` has, for each episode and turn,
    [output tokens] under the current policy.
    """
    values: dict[str, Float64Array] = {}
    for player, returns in _returns(group).items():
        values[player] = np.zeros_like(returns)
        if len(returns) < 2 or is_rounding(returns - exact_mean(returns), returns):
            continue
        parts = [_log_weight_and_energy(one, own, player) for one, own in zip(group.episodes, logprobs, strict=True)]
        logs, energies = np.array(parts).T
        masses = np.exp(2 * (logs - logs.max())) * energies
        counted = ~np.eye(len(returns), dtype=np.bool_) if options.leave_one_out else np.ones((len(returns),) * 2, np.bool_)
        shares = np.where(counted, masses, 0.0)
        # Where no other episode has a mass, all of them count alike.
        shares = np.where(shares.any(1, keepdims=True), shares, counted)
        values[player] = returns - (shares @ returns) / shares.sum(1)
        if options.normalize_std:
            largest = float(np.abs(returns).max())
            values[player] /= largest * float(np.std(returns / largest))
    return _per_turn(group, values)


def _log_weight_and_energy(episode: Trajectory, logprobs: Sequence[Float32Array], player: str) -> tuple[float, float]:
    """Return log W and g of the trained turns of `player`."""
    chosen = [at for at, turn in enumerate(episode.turns) if turn.in_loss and turn.player == player]
    current = [logprobs[at].astype(np.float64) for at in chosen]
    weight = math.fsum(
        float((own - episode.turns[at].output_logprobs).sum()) for at, own in zip(chosen, current, strict=True)
    )
    return weight, math.fsum(float(((1 - np.exp(own)) ** 2).sum()) for own in current)


def _by_returns(group: Group, rule: Callable[[Float64Array], Float64Array]) -> Sequence[Float64Array]:
    """Apply `rule` to the [episodes] returns of each player; equal returns and single episodes have no advantage."""
    values: dict[str, Float64Array] = {}
    for player, returns in _returns(group).items():
        alike = len(returns) < 2 or is_rounding(returns - exact_mean(returns), returns)
        values[player] = np.zeros_like(returns) if alike else rule(returns)
    return _per_turn(group, values)


def _returns(group: Group) -> dict[str, Float64Array]:
    """Return the returns of each player, [episodes]; an episode without its turns has the final reward alone."""
    return {
        player: np.array([part_of(one, player).total() for one in group.episodes]) for player in players_of(group.episodes)
    }


def _per_turn(group: Group, values: dict[str, Float64Array]) -> list[Float64Array]:
    return [
        np.array([values[turn.player][number] for turn in one.turns], np.float64)
        for number, one in enumerate(group.episodes)
    ]


def _short_group_scale(episodes: int, group_size: int | None) -> float:
    if group_size is None or not 1 < episodes < group_size:
        return 1.0
    return episodes / (episodes - 1) * (group_size - 1) / group_size
