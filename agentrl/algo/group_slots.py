"""What groups are trained, and as what: `algorithm.keep`, `algorithm.shaping`, and a price for the KL. numpy only.

Invariant: shaping changes rewards and which turns are trained, and nothing that was sampled; records show the workflow's own
rewards. Advantages that `score_group` gave stay as they are. A price is known when the tokens of its turn are sampled, so it
is credited to the turn and to what was sent before, whenever the workflow's own reward of the turn is set. A batch of kept
groups is conditioned on what the function asks for, so its figures are not those of all groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Final, Literal

import numpy as np
from pydantic import Field

from agentrl.algo.advantages import GroupAdvantages
from agentrl.algo.advantages.parts import Float64Array, PricedTurn
from agentrl.algo.slots import Bundled, Loaded, NoOptions, row
from agentrl.config.base import Config
from agentrl.errors import ConfigError
from agentrl.types import Float32Array, Group, Sample, StopReason, Trajectory, Turn

KEEPS: dict[str, Bundled] = {}
SHAPINGS: dict[str, Bundled] = {}
EQUAL = 1e-9
"""Returns that differ by less than this part of the largest are equal."""
CUT_SHORT: Final = frozenset({StopReason.TURN_LIMIT, StopReason.TOKEN_LIMIT, StopReason.CONTEXT_LIMIT, StopReason.DEADLINE})
"""Ends of an episode that did not come to its own."""
MAX_EXPONENT = 20.0
"""Bound of the exponent of estimator 3, so that a token whose reference is nearly impossible pays a finite price."""


@row(KEEPS, "all", "all groups")
def every_group(group: Group) -> bool:
    """Keep each group."""
    del group
    return True


@row(KEEPS, "mixed", "groups with an advantage other than 0", needs=("advantages",))
def mixed(group: Group, options: NoOptions, estimate: GroupAdvantages) -> bool:
    """Keep a group that teaches something: a turn whose tokens may be trained has an advantage other than 0.

    With one player and rewards of 0 and 1 it is DAPO's dynamic sampling (arXiv 2503.14476, section 3.2). `estimate` is that
    of `algorithm.advantage`, or, where this needs a model's numbers or the batch, one that finds the same groups equal.
    """
    del options
    return any(
        value != 0 and turn.in_loss and len(turn.output_ids) > 0
        for episode, values in zip(group.episodes, estimate.per_turn, strict=True)
        for turn, value in zip(episode.turns, values.tolist(), strict=True)
    )


def returns_differ(group: Group) -> bool:
    """Return whether the episodes of a group differ in a player's return, or in the advantages that `score_group` gave."""
    if any(episode.advantage is not None for episode in group.episodes):
        return len({episode.advantage for episode in group.episodes}) > 1
    returns = [{"": episode.final_reward or 0.0, **episode.player_returns()} for episode in group.episodes]
    for player in dict.fromkeys(name for one in returns for name in one):
        own = [one.get(player, one[""]) for one in returns]
        if max(own) - min(own) > EQUAL * max(map(abs, own)):
            return True
    return False


@row(SHAPINGS, "none", "rewards as they are")
def unshaped(group: Group, options: NoOptions) -> Group:
    """Return the group as it is."""
    del options
    return group


class OverlongOptions(Config):
    """Options of `soft_overlong`."""

    limit: int = Field(ge=1)
    """Sampled tokens from which on the whole punishment is paid, such as those after which answers are cut off."""
    cache: int | None = Field(default=None, ge=1)
    """Tokens below the limit over which the punishment grows; none: a fifth of the limit, as in the paper."""
    weight: float = Field(default=1.0, gt=0)
    """The whole punishment."""
    over: Literal["episode", "turn"] = "episode"
    """What has a length: all turns of a player in an episode together, or each turn."""


@row(
    SHAPINGS,
    "soft_overlong",
    "reward less up to {weight}, from below {limit} sampled tokens of each {over} on (cache {cache})",
)
def soft_overlong(group: Group, options: OverlongOptions) -> Group:
    """Take a punishment off the reward that grows from 0 to `weight` between limit - cache and limit sampled tokens.

    DAPO's soft overlong punishment (arXiv 2503.14476, equation 13). A length is that of trained turns, and is paid for when
    the tokens are sampled that go beyond, so nothing that was sent later is credited with it.
    """

    def of(episode: Trajectory) -> Trajectory:
        lengths: dict[str, int] = {}
        turns = list(episode.turns)
        for at in sorted(range(len(turns)), key=lambda at: turns[at].sent_at):
            turn = turns[at]
            if not turn.in_loss:
                continue
            before = 0 if options.over == "turn" else lengths.get(turn.player, 0)
            lengths[turn.player] = before + len(turn.output_ids)
            price = punishment(lengths[turn.player], options) - punishment(before, options)
            turns[at] = priced(turn, price) if price else turn
        return replace(episode, turns=tuple(turns))

    return replace(group, episodes=tuple(map(of, group.episodes)))


def punishment(length: int, options: OverlongOptions) -> float:
    """Return what `length` sampled tokens cost.

    Example:
        >>> options = OverlongOptions(limit=100, cache=20)
        >>> [punishment(length, options) for length in (80, 90, 100, 500)]
        [0.0, 0.5, 1.0, 1.0]
    """
    cache = min(options.cache or max(1, options.limit // 5), options.limit)
    return options.weight * min(1.0, max(0.0, (length - options.limit + cache) / cache))


class TruncatedOptions(Config):
    """Options of `mask_truncated`."""

    over: Literal["episode", "turn"] = "episode"
    """What leaves the loss: all turns of an episode that was cut short, or turns that were cut off, alone."""


@row(SHAPINGS, "mask_truncated", "each {over} that was cut off leaves the loss")
def mask_truncated(group: Group, options: TruncatedOptions) -> Group:
    """Take out of the loss what was cut off (DAPO's overlong filtering, arXiv 2503.14476, section 3.4).

    A turn is cut off by its token limit; an episode is cut short if a turn of it is, or by one of the limits in `CUT_SHORT`.
    Its return stays in the baseline of the others.
    """

    def of(episode: Trajectory) -> Trajectory:
        is_cut = [turn.stop_reason == StopReason.LENGTH for turn in episode.turns]
        if options.over == "episode":
            is_cut = [any(is_cut) or episode.stop_reason in CUT_SHORT] * len(is_cut)
        turns = [replace(turn, left_out=True) if cut else turn for turn, cut in zip(episode.turns, is_cut, strict=True)]
        return replace(episode, turns=tuple(turns))

    return replace(group, episodes=tuple(map(of, group.episodes)))


def shaped_groups(groups: Sequence[Group], function: Loaded[Group]) -> list[Group]:
    """Return what `function` makes of each group.

    Raises:
        ConfigError: the function raised, or changed more than rewards and `left_out`.
    """
    return [_with_same_tokens(group, function) for group in groups]


def _with_same_tokens(group: Group, function: Loaded[Group]) -> Group:
    result = function(group)
    if result is group:
        return group
    before = [[_as_sampled(turn) for turn in episode.turns] for episode in group.episodes]
    after = [[_as_sampled(turn) for turn in episode.turns] for episode in result.episodes]
    if result.index != group.index or before != after:
        raise ConfigError(
            f"{function.where} changed what was sampled in group {group.index}; return a group with the same episodes and "
            "turns, of which only rewards and left_out differ"
        )
    return result


def _as_sampled(turn: Turn) -> tuple[object, ...]:
    """Return what no function may change; arrays are the very same ones."""
    return id(turn.context_ids), id(turn.output_ids), id(turn.output_logprobs), turn.spans, turn.player, turn.sent_at


def without_left_out(sample: Sample, shaped: Trajectory) -> Sample:
    """Return `sample` of the episode without the tokens of turns that shaping left out in its loss mask."""
    trains = np.array([turn.in_loss for turn in shaped.turns], np.bool_)
    return replace(sample, loss_mask=sample.loss_mask & trains[sample.turn_index])


def kl_estimate(behavior: Float32Array, reference: Float32Array, k: Literal[1, 2, 3]) -> Float64Array:
    """Return the estimate of KL(behavior || reference) by each token, [tokens], of log-probs in nats (Schulman 2020).

    Example:
        >>> one, other = np.array([-1.0], np.float32), np.array([-2.0], np.float32)
        >>> [round(float(kl_estimate(one, other, k)[0]), 3) for k in (1, 2, 3)]
        [1.0, 0.5, 0.368]
    """
    difference = behavior.astype(np.float64) - reference
    if k == 1:
        return difference
    if k == 2:
        return difference**2 / 2
    return np.expm1(np.minimum(-difference, MAX_EXPONENT)) + difference


def with_kl_rewards(
    groups: Sequence[Group], reference: Sequence[Sequence[Sequence[Float32Array]]], *, weight: float, k: Literal[1, 2, 3]
) -> list[Group]:
    """Return `groups`, in which each trained turn pays `weight` times the sum of its tokens' KL.

    `reference` has, for each group, episode and turn, [output tokens] log-probs of the reference. Source: Ziegler et al.,
    arXiv 1909.08593, equation 2: R = r - weight * log(pi / reference), here of the policy that sampled.
    """

    def paid(turn: Turn, logprobs: Float32Array) -> Turn:
        if not turn.in_loss:
            return turn
        return priced(turn, weight * float(kl_estimate(turn.output_logprobs, logprobs, k).sum()))

    def paid_episode(episode: Trajectory, own: Sequence[Float32Array]) -> Trajectory:
        return replace(episode, turns=tuple(paid(turn, each) for turn, each in zip(episode.turns, own, strict=True)))

    return [
        replace(group, episodes=tuple(paid_episode(one, own) for one, own in zip(group.episodes, of_group, strict=True)))
        for group, of_group in zip(groups, reference, strict=True)
    ]


def priced(turn: Turn, price: float) -> Turn:
    """Return `turn` with `price` taken off its reward, paid before anything that was sent later."""
    moment = turn.sent_at + 1  # the next event of the episode has this number at the earliest
    before = turn.at_once if isinstance(turn, PricedTurn) else 0.0
    if turn.reward is None or (turn.rewarded_at == moment and not before):
        return replace(turn, reward=(turn.reward or 0.0) - price, rewarded_at=moment)
    same = {each.name: getattr(turn, each.name) for each in fields(Turn) if each.name != "reward"}
    return PricedTurn(**same, reward=turn.reward - price, at_once=before - price)
