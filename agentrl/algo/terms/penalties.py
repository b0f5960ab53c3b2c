"""Terms that pull the policy towards another one, or towards chance.

Invariant: each is finite at any log-probs; none has its weight in it.
"""

from __future__ import annotations

import torch

from agentrl.algo.loss import MAX_LOG_RATIO
from agentrl.algo.loss_batch import LossBatch, TokenLoss, mean
from agentrl.algo.terms.term_options import EntropyOptions, KlOptions, LogRatioOptions
from agentrl.errors import InvariantError


def entropy(batch: LossBatch, options: EntropyOptions) -> TokenLoss:
    """-H, H the entropy of the next-token distribution (Mnih et al., arXiv 1602.01783, section 4)."""
    if batch.entropy is None:
        raise InvariantError("the term entropy needs LossBatch.entropy, which the trainer did not compute")
    return TokenLoss(loss=-batch.entropy, metrics={"entropy": mean(batch.entropy)})


def kl(batch: LossBatch, options: KlOptions) -> TokenLoss:
    """KL(pi || reference) by k1 = d, k2 = d^2 / 2 or k3 = exp(-d) - 1 + d, d = log pi - log reference (Schulman 2020)."""
    if batch.reference_logprobs is None:
        raise InvariantError("the term kl needs LossBatch.reference_logprobs, which the trainer did not compute")
    difference = batch.current_logprobs - batch.reference_logprobs.detach()
    if options.k == 1:
        loss = difference
    elif options.k == 2:
        loss = difference.square() / 2
    else:
        loss = torch.expm1((-difference).clamp(max=MAX_LOG_RATIO)) + difference
    return TokenLoss(loss=loss, metrics={"kl": mean(loss)})


def log_ratio(batch: LossBatch, options: LogRatioOptions) -> TokenLoss:
    """(log pi - log mu)^2 (Kimi k1.5, arXiv 2501.12599; prime-rl with a weight of 1e-3)."""
    square = (batch.current_logprobs - batch.behavior_logprobs).square()
    return TokenLoss(loss=square, metrics={"square": mean(square)})
