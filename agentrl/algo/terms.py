"""The terms, which are added to a policy loss: each with its options, its row in the table, and its function.

Invariant: the driver reads the table, so nothing here imports torch. A function gets a `LossBatch` and its options, and
returns the loss of each token before its weight, which is finite at any log-probs. Each term is dense: tokens of advantage 0
have a gradient.
"""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from agentrl.algo.loss_batch import MAX_LOG_RATIO, LossBatch, TokenLoss, mean
from agentrl.algo.slots import Bundled, row
from agentrl.config.base import Config
from agentrl.errors import InvariantError

__path__: list[str] = []  # agentrl.support.moved finds the former modules below this name

TERMS: dict[str, Bundled] = {}


class WeightSchedule(Config):
    """Options that every term has, also a user's."""

    weight: float
    """Factor of the term at the first step."""
    final_weight: float | None = None
    """Factor after `over_steps`; None: `weight` all along."""
    over_steps: int = Field(default=0, ge=0)
    """Training steps in which the factor goes from `weight` to `final_weight`, in a line."""

    @model_validator(mode="after")
    def _has_an_end(self) -> Self:
        if (self.final_weight is None) != (self.over_steps == 0):
            raise ValueError("expected final_weight and over_steps together; set both, or neither for a constant weight")
        return self


class BundledTermOptions(WeightSchedule):
    """Options that every bundled term has; none is a bonus."""

    weight: float = Field(default=0.001, ge=0)
    """Factor of the term at the first step."""
    final_weight: float | None = Field(default=None, ge=0)
    """Factor after `over_steps`; None: `weight` all along."""


class EntropyOptions(BundledTermOptions):
    """Options of `entropy`."""


@row(TERMS, "entropy", "-H", needs=("entropy",), dense=True)
def entropy(batch: LossBatch, options: EntropyOptions) -> TokenLoss:
    """-H, H the entropy of the next-token distribution (Mnih et al., arXiv 1602.01783, section 4)."""
    if batch.entropy is None:
        raise InvariantError("the term entropy needs LossBatch.entropy, which the trainer did not compute")
    return TokenLoss(loss=-batch.entropy, metrics={"entropy": mean(batch.entropy)})


class KlOptions(BundledTermOptions):
    """Options of `kl`."""

    k: Literal[1, 2, 3] = 2
    """Estimator. The gradient of 2 is that of the KL; of 3, that of the other direction; of 1, 0 on average."""


@row(TERMS, "kl", "KL(pi || reference), estimator {k}", needs=("reference",), dense=True)
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
        loss = (-difference).clamp(max=MAX_LOG_RATIO).expm1() + difference
    return TokenLoss(loss=loss, metrics={"kl": mean(loss)})


class LogRatioOptions(BundledTermOptions):
    """Options of `log_ratio`."""


@row(TERMS, "log_ratio", "(log pi - log mu)^2", dense=True)
def log_ratio(batch: LossBatch, options: LogRatioOptions) -> TokenLoss:
    """(log pi - log mu)^2 (Kimi k1.5, arXiv 2501.12599; prime-rl with a weight of 1e-3)."""
    square = (batch.current_logprobs - batch.behavior_logprobs).square()
    return TokenLoss(loss=square, metrics={"square": mean(square)})


class ValueOptions(BundledTermOptions):
    """Options of `value`."""

    weight: float = Field(default=0.5, ge=0)
    """Factor at the first step; under `critic.model: trunk` it says how much the critic's loss moves the policy."""
    clip: float | None = Field(default=0.2, gt=0)
    """How far the values that are trained may go from those before the batch; none: as far as they like."""


@row(TERMS, "value", "(V - target)^2 / 2, V within {clip} of its value before the batch", needs=("values",), dense=True)
def value_error(batch: LossBatch, options: ValueOptions) -> TokenLoss:
    """max((V - T)^2, (V' - T)^2) / 2, where V' is V within `clip` of the value V0 before the batch, and T the target.

    The clipped form is that of the reference implementation of PPO (OpenAI baselines, ppo2); Andrychowicz et al., arXiv
    2006.05990, section 3.2, describe it.
    """
    if batch.values is None or batch.value_targets is None or batch.proximal_values is None:
        raise InvariantError("the term value needs values and targets in the LossBatch; they come with algorithm.critic")
    values, targets, before = batch.values, batch.value_targets, batch.proximal_values
    loss = error = (values - targets).square()
    if options.clip is not None:
        bounded = values.clamp(before - options.clip, before + options.clip)
        loss = error.maximum((bounded - targets).square())
    metrics = {"value": mean(values), "target": mean(targets), "squared_error": mean(error), "clipped": mean(loss > error)}
    return TokenLoss(loss=loss / 2, metrics=metrics)
