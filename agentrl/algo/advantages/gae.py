"""Generalized advantage estimation from a critic's values, in float64, over turns or over tokens.

Invariant: with `trace` 1 an advantage is the return-to-go of `turn` less the value of its own state, which does not depend
on the action, so the expected policy gradient stays.

Source: Schulman et al., arXiv 1506.02438, equation 16: A_t = delta_t + discount * trace * A_(t+1), where delta_t = r_t +
discount * V_(t+1) - V_t and V is 0 after the end. A step is a turn or a token; r_t is the rewards set between the sending of
the turn and that of the next one of its player that no declared branch separates from it. The last step gets the final one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from pydantic import Field

from agentrl.algo.advantages.parts import Float64Array, PlayerPart, part_of, players_of
from agentrl.algo.slots import Bundled, row
from agentrl.config.base import Config
from agentrl.errors import InvariantError
from agentrl.types import Float32Array, Group, Trajectory

VALUE_ADVANTAGES: dict[str, Bundled] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueEstimate:
    """Advantages and the critic's targets of one episode."""

    advantages: tuple[Float64Array, ...]
    """For each turn: [output tokens] float64."""
    targets: tuple[Float64Array, ...]
    """For each turn: [output tokens] float64, what the values are trained towards."""


class GaeOptions(Config):
    """Options of `turn_gae` and `token_gae`."""

    discount: float = Field(default=1.0, ge=0, le=1)
    """Discount of a step: a turn, or a token."""
    trace: float = Field(default=0.95, ge=0, le=1)
    """Lambda: 1 is the return less the value, 0 the error of one step."""


@row(
    VALUE_ADVANTAGES,
    "turn_gae",
    "sum over later turns of ({discount} * {trace})^l * (r + {discount} V' - V)",
    needs=("values",),
)
def turn_gae(group: Group, options: GaeOptions, values: Sequence[Sequence[Float32Array]]) -> Sequence[ValueEstimate]:
    """Estimate over turns: the value of a turn is that before its first token, and its tokens share its advantage.

    `values` has, for each episode and turn, [output tokens] values of the states before the tokens.
    """
    return [_over_turns(one, options, own) for one, own in zip(group.episodes, values, strict=True)]


@row(
    VALUE_ADVANTAGES,
    "token_gae",
    "sum over later tokens of ({discount} * {trace})^l * (r + {discount} V' - V)",
    needs=("values",),
)
def token_gae(group: Group, options: GaeOptions, values: Sequence[Sequence[Float32Array]]) -> Sequence[ValueEstimate]:
    """Estimate over the sampled tokens; the reward of a turn comes with its last one.

    `values` has, for each episode and turn, [output tokens] values of the states before the tokens.
    """
    return [_over_tokens(one, options, own) for one, own in zip(group.episodes, values, strict=True)]


def gae(rewards: Sequence[float], values: Sequence[float], discount: float, trace: float) -> list[float]:
    """Return the advantage of each step of one sequence.

    Example:
        >>> gae([0.0, 1.0], [0.0, 0.0], discount=0.5, trace=1.0)
        [0.5, 1.0]
    """
    result: list[float] = []
    following = advantage = 0.0
    for reward, value in zip(reversed(rewards), reversed(values), strict=True):
        advantage = reward + discount * following - value + discount * trace * advantage
        following = value
        result.append(advantage)
    return result[::-1]


def _over_turns(episode: Trajectory, options: GaeOptions, values: Sequence[Float32Array]) -> ValueEstimate:
    _check_values(episode, values)
    advantages = np.zeros(len(episode.turns))
    first = np.array([own[0] if len(own) else 0.0 for own in values], np.float64)
    for player in players_of([episode]):
        part = part_of(episode, player)
        for index, at in enumerate(part.at.tolist()):
            chain = _chain(part, index)
            advantages[at] = gae(_earned(part, chain), first[part.at[chain]].tolist(), options.discount, options.trace)[0]
    sizes = [len(own) for own in values]
    return ValueEstimate(
        advantages=tuple(np.full(size, value) for size, value in zip(sizes, advantages, strict=True)),
        targets=tuple(np.full(size, value) for size, value in zip(sizes, advantages + first, strict=True)),
    )


def _over_tokens(episode: Trajectory, options: GaeOptions, values: Sequence[Float32Array]) -> ValueEstimate:
    _check_values(episode, values)
    advantages = [np.zeros(len(own)) for own in values]
    for player in players_of([episode]):
        part = part_of(episode, player)
        whole = bool(part.related.all())
        starts = [int(np.argmin(part.sent_at))] if whole and len(part.at) else range(len(part.at))
        for index in starts:
            chain = _chain(part, index)
            steps = [values[at] if len(values[at]) else np.zeros(1, np.float32) for at in part.at[chain].tolist()]
            rewards = [np.zeros(len(own)) for own in steps]
            for own, reward in zip(rewards, _earned(part, chain), strict=True):
                own[-1] = reward
            flat = gae(np.concatenate(rewards).tolist(), np.concatenate(steps).tolist(), options.discount, options.trace)
            parts = np.split(np.array(flat), np.cumsum([len(own) for own in steps])[:-1])
            for place, found in zip(chain if whole else chain[:1], parts, strict=False):
                at = int(part.at[place])
                advantages[at] = found[: len(values[at])]
    return ValueEstimate(
        advantages=tuple(advantages),
        targets=tuple(advantage + own for advantage, own in zip(advantages, values, strict=True)),
    )


def _chain(part: PlayerPart, index: int) -> list[int]:
    """Return the turns from `index` on in the order of sending, without those of independent branches."""
    later = np.flatnonzero(part.related[index] & (part.sent_at >= part.sent_at[index]))
    return later[np.argsort(part.sent_at[later], kind="stable")].tolist()


def _earned(part: PlayerPart, chain: Sequence[int]) -> list[float]:
    """Return what each turn of `chain` earns: the rewards of related turns that were set until the next one was sent."""
    credited = part.related[chain[0], part.earners] & (part.rewarded_at > part.sent_at[chain[0]])
    at = np.searchsorted(part.sent_at[chain], part.rewarded_at[credited]) - 1
    # Not np.bincount: of no rewards at all it gives integers, which drop the fraction of the final one.
    earned = np.zeros(len(chain), np.float64)
    np.add.at(earned, at, part.rewards[credited])
    earned[-1] += part.final
    return earned.tolist()


def _check_values(episode: Trajectory, values: Sequence[Float32Array]) -> None:
    got, expected = [len(own) for own in values], [len(turn.output_ids) for turn in episode.turns]
    if got != expected or not all(np.isfinite(own).all() for own in values):
        raise InvariantError(
            f"episode {episode.episode_id!r}: expected a finite value for each of {expected} tokens of its turns, got {got}"
        )
