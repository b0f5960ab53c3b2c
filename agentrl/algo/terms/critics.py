"""The loss of a critic."""

from __future__ import annotations

import torch

from agentrl.algo.loss_batch import LossBatch, TokenLoss, mean
from agentrl.algo.terms.term_options import ValueOptions
from agentrl.errors import InvariantError


def value_error(batch: LossBatch, options: ValueOptions) -> TokenLoss:
    """max((V - T)^2, (V' - T)^2) / 2, where V' is V within `clip` of the value V0 before the batch, and T the target.

    The clipped form is that of the reference implementation of PPO (OpenAI baselines, ppo2); Andrychowicz et al., arXiv
    2006.05990, section 3.2, describe it.
    """
    if batch.values is None or batch.value_targets is None or batch.proximal_values is None:
        raise InvariantError("the term value needs values and targets in the LossBatch; they come with algorithm.critic")
    values, targets, before = batch.values, batch.value_targets, batch.proximal_values
    error = (values - targets).square()
    loss, clipped = error, torch.zeros_like(error, dtype=torch.bool)
    if options.clip is not None:
        bounded = values.clamp(before - options.clip, before + options.clip)
        loss = torch.maximum(error, (bounded - targets).square())
        clipped = loss > error
    metrics = {"value": mean(values), "target": mean(targets), "squared_error": mean(error), "clipped": mean(clipped)}
    return TokenLoss(loss=loss / 2, metrics=metrics)
