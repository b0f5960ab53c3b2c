"""Corrections that look at all trained tokens of a turn or a sample together.

Invariant: the tokens of a segment share their fate, except under `m2po_mask`.
"""

from __future__ import annotations

import torch

from agentrl.algo.corrections.correction_options import GeometricOptions, M2poMaskOptions, TruncateOptions
from agentrl.algo.loss import MAX_LOG_RATIO
from agentrl.algo.loss_batch import LossBatch, Weights, mean_by, sum_by
from agentrl.algo.shares import ascending_in_shares, running_sum


def sequence_truncate(batch: LossBatch, options: TruncateOptions) -> Weights:
    """min(W, cap), W the product of w over the segment (sequence-level truncated importance sampling)."""
    log_weight = sum_by(batch.proximal_logprobs - batch.behavior_logprobs, _segment(batch, options.segment))
    weight = log_weight.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp().detach()
    over = weight > options.cap
    return Weights(weight=weight.clamp(max=options.cap), keep=torch.ones_like(over), capped=over)


def geometric_mask(batch: LossBatch, options: GeometricOptions) -> Weights:
    """1, and segments whose geometric mean of w is outside low to high leave the loss.

    Beside the token correction `clamp` with an infinite cap it is the masked importance sampling of verl's guide to rollout
    correction.
    """
    log_weight = mean_by(batch.proximal_logprobs - batch.behavior_logprobs, _segment(batch, options.segment))
    average = log_weight.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp().detach()
    keep = (average >= options.low) & (average <= options.high)
    return Weights(weight=keep.to(average.dtype), keep=keep)


def m2po_mask(batch: LossBatch, options: M2poMaskOptions) -> Weights:
    """1, and the tokens of the largest (log w)^2 leave the loss until the mean of the others is within the budget.

    The form of AReaL, without regard to the sign of the advantage; the loss `m2po` is that of the paper's own code
    (arXiv 2510.01161). The token of the smallest square always stays.
    """
    share = batch.sample if options.over == "sample" else torch.zeros_like(batch.sample)
    squares = (batch.proximal_logprobs - batch.behavior_logprobs).detach().double().square()
    order = ascending_in_shares(squares, share)
    count = running_sum(torch.ones_like(squares), share[order])
    average = running_sum(squares[order], share[order]) / count
    keep = torch.empty_like(order, dtype=torch.bool)
    keep[order] = (average <= options.budget) | (count == 1)
    return Weights(weight=keep.to(batch.advantages.dtype), keep=keep)


def _segment(batch: LossBatch, name: str) -> torch.Tensor:
    return batch.turn if name == "turn" else batch.sample
