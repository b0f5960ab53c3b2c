"""Corrections that look at one token.

Invariant: the weight of a token that stays is at most the bound.
"""

from __future__ import annotations

import torch

from agentrl.algo.corrections.correction_options import CapOptions, IcePopOptions
from agentrl.algo.loss import behavior_weights
from agentrl.algo.loss_batch import LossBatch, Weights
from agentrl.algo.slots import NoOptions


def none(batch: LossBatch, options: NoOptions) -> Weights:
    """1: the difference between proximal and behavior policy is ignored."""
    ones = torch.ones_like(batch.advantages)
    return Weights(weight=ones, keep=ones > 0)


def clamp(batch: LossBatch, options: CapOptions) -> Weights:
    """min(w, cap): truncated importance sampling (Espeholt et al., arXiv 1802.01561; TIS with a cap of 2)."""
    weights = behavior_weights(batch.proximal_logprobs, batch.behavior_logprobs, options.cap, "clamp")
    return Weights(weight=weights.capped, keep=torch.ones_like(weights.over), capped=weights.over)


def mask(batch: LossBatch, options: CapOptions) -> Weights:
    """w, and tokens above the cap leave the loss (AReaL, arXiv 2505.24298)."""
    weights = behavior_weights(batch.proximal_logprobs, batch.behavior_logprobs, options.cap, "mask")
    return Weights(weight=weights.capped, keep=~weights.over)


def icepop(batch: LossBatch, options: IcePopOptions) -> Weights:
    """w, and tokens outside low to high leave the loss (IcePop, arXiv 2510.18855)."""
    weights = behavior_weights(batch.proximal_logprobs, batch.behavior_logprobs, options.high, "mask")
    keep = ~weights.over & (weights.raw >= options.low)
    return Weights(weight=torch.where(keep, weights.raw, 0.0), keep=keep)
