"""The KL to a reference as a part of the rewards.

Invariant: what a turn pays is known when its tokens are sampled, so it is credited to the turn and to what was sent before,
and to nothing that was sent later.

Source: Ziegler et al., arXiv 1909.08593, equation 2: R = r - weight * log(pi / reference), here of the policy that sampled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import numpy as np

from agentrl.algo.advantages.players import Float64Array
from agentrl.algo.advantages.prices import priced
from agentrl.types import Float32Array, Group, Trajectory, Turn

MAX_EXPONENT = 20.0
"""Bound of the exponent of estimator 3, so that a token whose reference is nearly impossible pays a finite price."""


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

    `reference` has, for each group, episode and turn, [output tokens] log-probs of the reference.
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
