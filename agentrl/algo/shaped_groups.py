"""What is done to the groups of a batch before their advantages: functions for `algorithm.shaping`. numpy only.

Invariant: a function changes rewards and which turns are trained, and nothing that was sampled. Records, and figures of
rewards, show those of the workflow. Advantages that `score_group` gave stay as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from agentrl.algo.advantages.prices import priced
from agentrl.algo.group_slots import OverlongOptions, TruncatedOptions
from agentrl.algo.slots import Loaded, NoOptions
from agentrl.errors import ConfigError
from agentrl.types import Group, Sample, StopReason, Trajectory, Turn

CUT_SHORT: Final = frozenset({StopReason.TURN_LIMIT, StopReason.TOKEN_LIMIT, StopReason.CONTEXT_LIMIT, StopReason.DEADLINE})
"""Ends of an episode that did not come to its own."""


def unshaped(group: Group, options: NoOptions) -> Group:
    """Return the group as it is."""
    del options
    return group


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
