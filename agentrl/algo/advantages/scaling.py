"""The scale of advantages: over the root mean square of a group, of a batch, or of all batches so far.

Invariant: nothing is subtracted, so a group that teaches nothing keeps advantages of exactly 0, and an estimate without bias
keeps its direction. Advantages that `score_group` gave stay as they are and count nowhere.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Final, Literal, TypeAlias

import msgspec
import numpy as np

from agentrl.algo.advantages.estimated import GroupAdvantages
from agentrl.algo.advantages.players import Float64Array
from agentrl.types import Group

Normalization: TypeAlias = Literal["group", "batch", "running"]
DECAY: Final = 0.99
"""Share of its weight that a batch keeps when the next one comes, under `running`: about 100 batches count."""


class RunningSquare(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The advantages of all batches so far, the older the less."""

    tokens: float = 0.0
    """Their weights together."""
    squares: float = 0.0
    """Sum over tokens of weight * A^2."""

    def followed_by(self, tokens: float, squares: float) -> RunningSquare:
        """Return the sums after a batch of `tokens` with this sum of squares.

        Example:
            >>> RunningSquare(100.0, 100.0).followed_by(1.0, 4.0)
            RunningSquare(tokens=100.0, squares=103.0)
        """
        return RunningSquare(DECAY * self.tokens + tokens, DECAY * self.squares + squares)


NO_BATCHES: Final = RunningSquare()


def scaled_advantages(
    groups: Sequence[Group], estimates: Sequence[GroupAdvantages], kind: Normalization, before: RunningSquare
) -> tuple[list[GroupAdvantages], RunningSquare]:
    """Return the advantages over their scale, and the running sums after this batch; `running` counts this batch too."""
    ours = [not any(each.advantage is not None for each in group.episodes) for group in groups]
    sums = [_sums(group, one) for group, one in zip(groups, estimates, strict=True)]
    tokens, squares = (math.fsum(each[at] for each, own in zip(sums, ours, strict=True) if own) for at in (0, 1))
    after = before.followed_by(tokens, squares) if kind == "running" else before
    whole = (after.tokens, after.squares) if kind == "running" else (tokens, squares)
    result = [
        _over(one, _root(*(of_group if kind == "group" else whole))) if own else one
        for one, of_group, own in zip(estimates, sums, ours, strict=True)
    ]
    return result, after


def _sums(group: Group, estimate: GroupAdvantages) -> tuple[float, float]:
    """Return the number of trained tokens of a group, and the sum of their squared advantages."""
    counts: list[float] = []
    squares: list[float] = []
    for at, episode in enumerate(group.episodes):
        for number, turn in enumerate(episode.turns):
            size = len(turn.output_ids) if turn.in_loss else 0
            if not size:
                continue
            counts.append(size)
            if estimate.per_token is None:
                squares.append(size * float(estimate.per_turn[at][number]) ** 2)
            else:
                squares.append(float(np.square(estimate.per_token[at][number]).sum()))
    return math.fsum(counts), math.fsum(squares)


def _root(tokens: float, squares: float) -> float:
    return math.sqrt(squares / tokens) if tokens and squares else 1.0


def _over(estimate: GroupAdvantages, scale: float) -> GroupAdvantages:
    def divided(values: Float64Array) -> Float64Array:
        return values / scale

    per_token = estimate.per_token
    return replace(
        estimate,
        per_turn=tuple(divided(values) for values in estimate.per_turn),
        per_token=None if per_token is None else tuple(tuple(divided(turn) for turn in one) for one in per_token),
    )
