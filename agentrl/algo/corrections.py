"""The corrections for the policy that sampled, and the centres of the trust region: options, rows and functions.

Invariant: the driver reads the tables, so nothing here imports torch. A correction returns weights without a gradient and a
mask; those of two corrections multiply, so that a token one of them drops is dropped. No gradient flows through a centre.
w is proximal / behavior here. The tokens of a segment share their fate, except under `m2po_mask`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal, NamedTuple, Self, cast

from pydantic import Field, model_validator

from agentrl.algo.loss_batch import (
    MAX_LOG_RATIO,
    LossBatch,
    Weights,
    ascending_in_shares,
    importance_ratio,
    mean_by,
    running_sum,
    sum_by,
)
from agentrl.algo.slots import Bundled, NoOptions, SlotValue, row, slot_value
from agentrl.config.base import Config

if TYPE_CHECKING:
    from torch import Tensor

__path__: list[str] = []  # agentrl.support.moved finds the former modules below this name

CORRECTIONS: dict[str, Bundled] = {}
PROXIMALS: dict[str, Bundled] = {}
"""Centres of the trust region. `forward` alone needs a forward pass of its own."""
PARTS: Final = {"proximal": PROXIMALS, "token": CORRECTIONS, "sequence": CORRECTIONS}
"""Parts of `algorithm.correction`, each with the table of what fills it."""


def correction_parts(given: object) -> dict[str, SlotValue]:
    """Return the parts that were given; a bare name or function corrects tokens."""
    fields = cast("dict[str, object]", given) if isinstance(given, dict) else {"token": given}
    if not fields.keys() <= PARTS.keys():
        fields = {"token": given}
    return {part: slot_value(f"algorithm.correction.{part}", value, PARTS[part]) for part, value in fields.items()}


class BehaviorWeights(NamedTuple):
    """The weight that corrects each token for the policy that sampled it."""

    raw: Tensor
    """[..] w = exp(proximal - behavior)."""
    capped: Tensor
    """[..] the factor of the objective: w, the cap, or 0."""
    over: Tensor
    """[..] bool: w is above the cap."""


def behavior_weights(
    proximal_logprobs: Tensor, behavior_logprobs: Tensor, cap: float, mode: Literal["clamp", "mask"]
) -> BehaviorWeights:
    """Return w = exp(proximal - behavior), [..], no gradient; above the cap, `capped` is the cap (`clamp`) or 0 (`mask`)."""
    raw = importance_ratio(proximal_logprobs.detach(), behavior_logprobs.detach())
    over = raw > cap
    capped = raw.clamp(max=cap) if mode == "clamp" else raw.masked_fill(over, 0.0)
    return BehaviorWeights(raw=raw, capped=capped, over=over)


@row(CORRECTIONS, "none", "1")
def none(batch: LossBatch, options: NoOptions) -> Weights:
    """1: the difference between proximal and behavior policy is ignored."""
    ones = batch.advantages.new_ones(batch.advantages.shape)
    return Weights(weight=ones, keep=ones > 0)


class CapOptions(Config):
    """Options of `clamp` and `mask`."""

    cap: float = Field(default=5.0, gt=0)
    """Largest weight proximal / behavior of a token."""


@row(CORRECTIONS, "clamp", "min(w, {cap})")
def clamp(batch: LossBatch, options: CapOptions) -> Weights:
    """min(w, cap): truncated importance sampling (Espeholt et al., arXiv 1802.01561; TIS with a cap of 2)."""
    weights = behavior_weights(batch.proximal_logprobs, batch.behavior_logprobs, options.cap, "clamp")
    return Weights(weight=weights.capped, keep=weights.over.new_ones(weights.over.shape), capped=weights.over)


@row(CORRECTIONS, "mask", "w, 0 above {cap}")
def mask(batch: LossBatch, options: CapOptions) -> Weights:
    """w, and tokens above the cap leave the loss (AReaL, arXiv 2505.24298)."""
    weights = behavior_weights(batch.proximal_logprobs, batch.behavior_logprobs, options.cap, "mask")
    return Weights(weight=weights.capped, keep=~weights.over)


class MaskBounds(Config):
    """Two bounds, between which something stays in the loss."""

    low: float = Field(ge=0)
    """Everything below leaves the loss."""
    high: float = Field(gt=0)
    """Everything above leaves the loss."""

    @model_validator(mode="after")
    def _leave_something(self) -> Self:
        if self.low >= self.high:
            raise ValueError(f"expected low below high; between {self.low:g} and {self.high:g} no token stays")
        return self


class IcePopOptions(MaskBounds):
    """Options of `icepop`."""

    low: float = Field(default=0.5, ge=0)
    """Tokens of a lower weight leave the loss."""
    high: float = Field(default=5.0, gt=0)
    """Tokens of a higher weight leave the loss."""


@row(CORRECTIONS, "icepop", "w, 0 outside {low} to {high}")
def icepop(batch: LossBatch, options: IcePopOptions) -> Weights:
    """w, and tokens outside low to high leave the loss (IcePop, arXiv 2510.18855)."""
    weights = behavior_weights(batch.proximal_logprobs, batch.behavior_logprobs, options.high, "mask")
    keep = ~weights.over & (weights.raw >= options.low)
    return Weights(weight=weights.raw.masked_fill(~keep, 0.0), keep=keep)


class M2poMaskOptions(Config):
    """Options of `m2po_mask`."""

    budget: float = Field(default=0.04, gt=0)
    """Largest mean square of the log weights that stay."""
    over: Literal["sample", "microbatch"] = "sample"
    """Tokens that share a budget. `microbatch` is the published code, whose loss depends on the packing."""


@row(CORRECTIONS, "m2po_mask", "1, 0 for the largest (log w)^2 until the mean over the {over} is {budget}")
def m2po_mask(batch: LossBatch, options: M2poMaskOptions) -> Weights:
    """1, and the tokens of the largest (log w)^2 leave the loss until the mean of the others is within the budget.

    The form of AReaL, without regard to the sign of the advantage; the loss `m2po` is that of the paper's own code
    (arXiv 2510.01161). The token of the smallest square always stays.
    """
    share = batch.segment(options.over)
    squares = (batch.proximal_logprobs - batch.behavior_logprobs).detach().double().square()
    order = ascending_in_shares(squares, share)
    count = running_sum(squares.new_ones(squares.shape), share[order])
    average = running_sum(squares[order], share[order]) / count
    stays = (average <= options.budget) | (count == 1)
    keep = stays.new_empty(stays.shape)
    keep[order] = stays
    return Weights(weight=keep.to(batch.advantages.dtype), keep=keep)


class TruncateOptions(Config):
    """Options of `sequence_truncate`."""

    cap: float = Field(default=2.0, gt=0)
    """Largest weight of a segment."""
    segment: Literal["turn", "sample"] = "turn"
    """Tokens whose weights are multiplied."""


@row(CORRECTIONS, "sequence_truncate", "min(product of w over the {segment}, {cap})")
def sequence_truncate(batch: LossBatch, options: TruncateOptions) -> Weights:
    """min(W, cap), W the product of w over the segment (sequence-level truncated importance sampling)."""
    log_weight = sum_by(batch.proximal_logprobs - batch.behavior_logprobs, batch.segment(options.segment))
    weight = log_weight.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp().detach()
    over = weight > options.cap
    return Weights(weight=weight.clamp(max=options.cap), keep=over.new_ones(over.shape), capped=over)


class GeometricOptions(MaskBounds):
    """Options of `geometric_mask`."""

    low: float = Field(default=0.99, ge=0)
    """Segments of a lower geometric mean leave the loss."""
    high: float = Field(default=1.001, gt=0)
    """Segments of a higher geometric mean leave the loss."""
    segment: Literal["turn", "sample"] = "turn"
    """Tokens whose mean is taken."""


@row(CORRECTIONS, "geometric_mask", "1, 0 where exp(mean of log w over the {segment}) is outside {low} to {high}")
def geometric_mask(batch: LossBatch, options: GeometricOptions) -> Weights:
    """1, and segments whose geometric mean of w is outside low to high leave the loss.

    Beside the token correction `clamp` with an infinite cap it is the masked importance sampling of verl's guide to rollout
    correction.
    """
    log_weight = mean_by(batch.proximal_logprobs - batch.behavior_logprobs, batch.segment(options.segment))
    average = log_weight.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp().detach()
    keep = (average >= options.low) & (average <= options.high)
    return Weights(weight=keep.to(average.dtype), keep=keep)


@row(PROXIMALS, "forward", "log pi under the weights before the step")
def forward(batch: LossBatch) -> Tensor:
    """Log-probs under the weights before the step, by a forward pass (decoupled PPO, arXiv 2505.24298)."""
    return batch.proximal_logprobs.detach()


@row(PROXIMALS, "versions", "log mu + a (log pi - log mu), a = age / (age + 1)")
def versions(batch: LossBatch) -> Tensor:
    """Log mu + a (log pi - log mu), a = age / (age + 1), without a forward pass (A-3PO, arXiv 2512.06547).

    The current policy is one version past the proximal one, which is `age` versions past the behavior policy.
    """
    behavior = batch.behavior_logprobs.detach()
    share = batch.ages / (batch.ages + 1)
    return behavior + share.to(behavior.dtype) * (batch.current_logprobs.detach() - behavior)


@row(PROXIMALS, "behavior", "log mu")
def behavior(batch: LossBatch) -> Tensor:
    """Log mu: PPO around the policy that sampled, whose correction is then 1."""
    return batch.behavior_logprobs.detach()
