"""Policy losses that weigh -A log pi by a number without a gradient, so that no token's gradient is clipped away.

Invariant: where current equals proximal and behavior, the gradient of each is that of -A log pi.
"""

from __future__ import annotations

import math

import torch

from agentrl.algo.loss import importance_ratio
from agentrl.algo.loss_batch import LossBatch, TokenLoss, mean, sum_by
from agentrl.algo.losses.loss_options import CispoOptions, DppoTvOptions, KimiOptions, VespoOptions
from agentrl.algo.shares import chosen
from agentrl.algo.slots import NoOptions

LOWEST_LOG_WEIGHT, HIGHEST_LOG_WEIGHT = math.log(1e-8), 20.0
"""Bounds of the log weight of a segment in `vespo`."""


def reinforce(batch: LossBatch, options: NoOptions) -> TokenLoss:
    """-A log pi (Williams 1992): no trust region."""
    return TokenLoss(loss=-batch.advantages * batch.current_logprobs)


def cispo(batch: LossBatch, options: CispoOptions) -> TokenLoss:
    """-A sg(min(r, 1 + clip_high)) log pi (MiniMax, arXiv 2506.13585, equation 4, without a lower bound)."""
    ratio = importance_ratio(batch.current_logprobs.detach(), batch.proximal_logprobs)
    cut = ratio > 1 + options.clip_high
    loss = -batch.advantages * ratio.clamp(max=1 + options.clip_high) * batch.current_logprobs
    return TokenLoss(loss=loss, metrics={"cut": mean(cut)})


def dppo_tv(batch: LossBatch, options: DppoTvOptions) -> TokenLoss:
    """-A sg(min(w, cap)) log pi, 0 where a probability moved too far along A (arXiv 2602.04879, binary total variation).

    It judges the change of the probability, pi - mu, and not the ratio: a token from 1e-6 to 1e-5 stays in the loss.
    """
    current = batch.current_logprobs.detach()
    moved = current.exp() - batch.behavior_logprobs.exp()
    rises = batch.advantages > 0
    outside = (rises & (moved > options.high)) | (~rises & (moved < -options.low))
    weight = importance_ratio(current, batch.behavior_logprobs).clamp(max=options.cap).masked_fill(outside, 0.0)
    return TokenLoss(loss=-batch.advantages * weight * batch.current_logprobs, clipped=outside)


def vespo(batch: LossBatch, options: VespoOptions) -> TokenLoss:
    """-A sg(phi) log pi, phi = exp(l) W^k exp(-l W), W the product of a segment's w (VESPO, arXiv 2602.10693).

    phi is 1 at W = 1 and falls on both sides where k = l. Weights of long segments are not normalized by length.
    """
    log_ratio = (batch.current_logprobs.detach() - batch.behavior_logprobs).clamp(-20.0, 20.0)
    together = sum_by(log_ratio, batch.turn if options.segment == "turn" else batch.sample)
    together = together.clamp(LOWEST_LOG_WEIGHT, HIGHEST_LOG_WEIGHT)
    rises = batch.advantages >= 0
    power = chosen(rises, options.power_positive, options.power_negative, together)
    decay = chosen(rises, options.decay_positive, options.decay_negative, together)
    phi = torch.exp(decay + power * together - decay * together.exp())
    return TokenLoss(loss=-batch.advantages * phi * batch.current_logprobs, metrics={"segment_weight": mean(phi)})


def topr(batch: LossBatch, options: NoOptions) -> TokenLoss:
    """-A log pi where A > 0, -A sg(min(w, 1)) log pi elsewhere (Le Roux et al., arXiv 2503.14286, TOPR, by token)."""
    weight = importance_ratio(batch.current_logprobs.detach(), batch.behavior_logprobs).clamp(max=1.0)
    weight = torch.where(batch.advantages > 0, 1.0, weight)
    return TokenLoss(loss=-batch.advantages * weight * batch.current_logprobs)


def kimi(batch: LossBatch, options: KimiOptions) -> TokenLoss:
    """-A log pi + tau / 2 (log pi - log mu)^2 (Kimi k1.5, arXiv 2501.12599, equation 3, by token)."""
    log_weight = batch.current_logprobs - batch.behavior_logprobs
    return TokenLoss(
        loss=-batch.advantages * batch.current_logprobs + options.tau / 2 * log_weight.square(),
        metrics={"square": mean(log_weight.square())},
    )
