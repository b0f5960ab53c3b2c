"""Policy losses that bound the ratio r = current / proximal.

Invariant: where current equals proximal, the gradient of each is that of -A log pi.
"""

from __future__ import annotations

import torch
from torch import Tensor

from agentrl.algo.loss import MAX_LOG_RATIO, clipped_objective, importance_ratio
from agentrl.algo.loss_batch import LossBatch, TokenLoss, mean, mean_by
from agentrl.algo.losses.loss_options import DualClipOptions, GspoOptions, M2poOptions, PpoOptions, SapoOptions
from agentrl.algo.shares import ascending_in_shares, chosen, running_sum


def ppo(batch: LossBatch, options: PpoOptions) -> TokenLoss:
    """-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) (Schulman et al., arXiv 1707.06347, equation 7)."""
    ratio = importance_ratio(batch.current_logprobs, batch.proximal_logprobs)
    loss = -clipped_objective(ratio, batch.advantages, options.clip_low, options.clip_high)
    return TokenLoss(loss=loss, clipped=_outside(ratio, batch.advantages, 1 - options.clip_low, 1 + options.clip_high))


def dual_clip(batch: LossBatch, options: DualClipOptions) -> TokenLoss:
    """`ppo`, but at least floor * A where A < 0 (Ye et al., arXiv 1912.09729, dual-clip PPO)."""
    ratio = importance_ratio(batch.current_logprobs, batch.proximal_logprobs)
    objective = clipped_objective(ratio, batch.advantages, options.clip_low, options.clip_high)
    floored = torch.maximum(objective, options.floor * batch.advantages)
    outside = _outside(ratio, batch.advantages, 1 - options.clip_low, 1 + options.clip_high)
    return TokenLoss(
        loss=-torch.where(batch.advantages < 0, floored, objective),
        clipped=outside | ((batch.advantages < 0) & (ratio > options.floor)),
    )


def gspo(batch: LossBatch, options: GspoOptions) -> TokenLoss:
    """`ppo` with one ratio for a segment, s = exp(mean of log r) (Zheng et al., arXiv 2507.18071, equations 5 and 14).

    Each token has the value of s and its own gradient: sg(s) * pi / sg(pi).
    """
    log_ratio = (batch.current_logprobs - batch.proximal_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    shared = mean_by(log_ratio.detach(), batch.turn if options.segment == "turn" else batch.sample)
    ratio = (shared + batch.current_logprobs - batch.current_logprobs.detach()).exp()
    loss = -clipped_objective(ratio, batch.advantages, options.clip_low, options.clip_high)
    return TokenLoss(loss=loss, clipped=_outside(ratio, batch.advantages, 1 - options.clip_low, 1 + options.clip_high))


def sapo(batch: LossBatch, options: SapoOptions) -> TokenLoss:
    """-A (4 / t) sigmoid(t (r - 1)): a soft gate instead of a clip (Gao et al., arXiv 2511.20347, equation 5)."""
    ratio = importance_ratio(batch.current_logprobs, batch.proximal_logprobs)
    temperature = chosen(batch.advantages > 0, options.positive, options.negative, ratio)
    return TokenLoss(loss=-batch.advantages * torch.sigmoid(temperature * (ratio - 1)) * 4 / temperature)


def m2po(batch: LossBatch, options: M2poOptions) -> TokenLoss:
    """`ppo` with the bounds exp(-t) and exp(t), as tight as the second moment of harmful tokens needs (arXiv 2510.01161).

    Harmful tokens already moved where A pushes them: A > 0 and r > 1, or A < 0 and r < 1. t is the largest with a mean of
    min((log r)^2, t^2) over them of at most `budget`. This is the loss of the paper's own code; `m2po_mask` is the other
    published form.
    """
    log_ratio = (batch.current_logprobs - batch.proximal_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    share = batch.sample if options.over == "sample" else torch.zeros_like(batch.sample)
    squares = log_ratio.detach().square()
    harmful = torch.sign(batch.advantages) * log_ratio.detach() > 0
    bound = largest_square(squares, harmful, share, options.budget).sqrt()
    lowest = torch.minimum(torch.exp(-bound), bound.new_tensor(1 - options.least_low))
    highest = torch.maximum(torch.exp(bound), bound.new_tensor(1 + options.least_high))
    ratio = log_ratio.exp()
    clipped = torch.minimum(torch.maximum(ratio, lowest), highest)
    loss = -torch.minimum(ratio * batch.advantages, clipped * batch.advantages)
    return TokenLoss(
        loss=loss, metrics={"harmful": mean(harmful)}, clipped=_outside(ratio, batch.advantages, lowest, highest)
    )


def largest_square(squares: Tensor, counted: Tensor, share: Tensor, budget: float) -> Tensor:
    """Return, at each token, the largest c with a mean of min(square, c) of at most `budget` over the counted of its share.

    Where no bound is needed, c is the square of `MAX_LOG_RATIO`. All are [T]; no gradient.
    """
    exact = torch.where(counted, squares, 0.0).double()
    order = ascending_in_shares(exact, share)
    sorted_squares, sorted_share, weight = exact[order], share[order], counted[order].double()
    totals = torch.zeros(len(share), dtype=torch.float64, device=share.device).index_add(0, sorted_share, weight)
    below = running_sum(sorted_squares, sorted_share)
    left = totals[sorted_share] - running_sum(weight, sorted_share)
    # With c at this square, the tokens above it add c each. The mean grows with c: the bound lies after the last that fits.
    fits = (below + left * sorted_squares <= budget * totals[sorted_share]) & (weight > 0)
    spent = torch.zeros_like(totals).index_add(0, sorted_share, torch.where(fits, sorted_squares, 0.0))
    fitting = torch.zeros_like(totals).index_add(0, sorted_share, fits.double())
    remaining = totals - fitting
    bound = torch.where(remaining > 0, (budget * totals - spent) / remaining.clamp(min=1), MAX_LOG_RATIO**2)
    return bound[share].to(squares.dtype)


def _outside(ratio: Tensor, advantages: Tensor, low: Tensor | float, high: Tensor | float) -> Tensor:
    return ((advantages > 0) & (ratio > high)) | ((advantages < 0) & (ratio < low))
