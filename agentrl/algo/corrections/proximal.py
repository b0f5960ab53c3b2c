"""The log-probs that stand for the proximal policy, the centre of the trust region.

Invariant: no gradient flows through them.
"""

from __future__ import annotations

from torch import Tensor

from agentrl.algo.loss_batch import LossBatch


def forward(batch: LossBatch) -> Tensor:
    """Log-probs under the weights before the step, by a forward pass (decoupled PPO, arXiv 2505.24298)."""
    return batch.proximal_logprobs.detach()


def versions(batch: LossBatch) -> Tensor:
    """Log mu + a (log pi - log mu), a = age / (age + 1), without a forward pass (A-3PO, arXiv 2512.06547).

    The current policy is one version past the proximal one, which is `age` versions past the behavior policy.
    """
    behavior = batch.behavior_logprobs.detach()
    share = batch.ages / (batch.ages + 1)
    return behavior + share.to(behavior.dtype) * (batch.current_logprobs.detach() - behavior)


def behavior(batch: LossBatch) -> Tensor:
    """Log mu: PPO around the policy that sampled, whose correction is then 1."""
    return batch.behavior_logprobs.detach()
