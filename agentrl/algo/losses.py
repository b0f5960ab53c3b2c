"""The policy losses: each with its options, its row in the table, and its function.

Invariant: the driver reads the table, so nothing here imports torch. A function gets a `LossBatch` and its options, and
returns the loss of each token before weights and aggregation. Where current, proximal and behavior are equal, its gradient
is that of -A log pi. r is current / proximal, w is current / behavior, A the advantage, sg stops the gradient.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from agentrl.algo.loss_batch import (
    MAX_LOG_RATIO,
    LossBatch,
    TokenLoss,
    ascending_in_shares,
    chosen,
    importance_ratio,
    mean,
    mean_by,
    running_sum,
    sum_by,
)
from agentrl.algo.slots import Bundled, NoOptions, row
from agentrl.config.base import Config

if TYPE_CHECKING:
    from torch import Tensor

__path__: list[str] = []  # agentrl.support.moved finds the former modules below this name

POLICY_LOSSES: dict[str, Bundled] = {}
LOWEST_LOG_WEIGHT, HIGHEST_LOG_WEIGHT = math.log(1e-8), 20.0
"""Bounds of the log weight of a segment in `vespo`."""


class PpoOptions(Config):
    """Options of `ppo`."""

    clip_low: float = Field(default=0.2, gt=0, lt=1)
    """Ratios below `1 - clip_low` are clipped."""
    clip_high: float = Field(default=0.2, gt=0)
    """Ratios above `1 + clip_high` are clipped."""


@row(POLICY_LOSSES, "ppo", "-min(r A, clip(r, 1 - {clip_low}, 1 + {clip_high}) A)")
def ppo(batch: LossBatch, options: PpoOptions) -> TokenLoss:
    """-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) (Schulman et al., arXiv 1707.06347, equation 7)."""
    ratio = importance_ratio(batch.current_logprobs, batch.proximal_logprobs)
    loss = -clipped_objective(ratio, batch.advantages, options.clip_low, options.clip_high)
    return TokenLoss(loss=loss, clipped=_outside(ratio, batch.advantages, 1 - options.clip_low, 1 + options.clip_high))


class DualClipOptions(PpoOptions):
    """Options of `dual_clip`."""

    floor: float = Field(default=3.0, gt=1)
    """A negative advantage counts at most this many times."""


@row(POLICY_LOSSES, "dual_clip", "-min(r A, clip(r, 1 - {clip_low}, 1 + {clip_high}) A), at least {floor} A where A < 0")
def dual_clip(batch: LossBatch, options: DualClipOptions) -> TokenLoss:
    """`ppo`, but at least floor * A where A < 0 (Ye et al., arXiv 1912.09729, dual-clip PPO)."""
    ratio = importance_ratio(batch.current_logprobs, batch.proximal_logprobs)
    objective = clipped_objective(ratio, batch.advantages, options.clip_low, options.clip_high)
    floored = objective.maximum(options.floor * batch.advantages)
    outside = _outside(ratio, batch.advantages, 1 - options.clip_low, 1 + options.clip_high)
    return TokenLoss(
        loss=-floored.where(batch.advantages < 0, objective),
        clipped=outside | ((batch.advantages < 0) & (ratio > options.floor)),
    )


class GspoOptions(Config):
    """Options of `gspo`."""

    clip_low: float = Field(default=3e-4, gt=0, lt=1)
    """Segment ratios below `1 - clip_low` are clipped."""
    clip_high: float = Field(default=4e-4, gt=0)
    """Segment ratios above `1 + clip_high` are clipped."""
    segment: Literal["turn", "sample"] = "turn"
    """Tokens that share one ratio: a turn, or all trained turns of a branch."""


@row(
    POLICY_LOSSES, "gspo", "-min(s A, clip(s, 1 - {clip_low}, 1 + {clip_high}) A), s = exp(mean of log r over the {segment})"
)
def gspo(batch: LossBatch, options: GspoOptions) -> TokenLoss:
    """`ppo` with one ratio for a segment, s = exp(mean of log r) (Zheng et al., arXiv 2507.18071, equations 5 and 14).

    Each token has the value of s and its own gradient: sg(s) * pi / sg(pi).
    """
    log_ratio = (batch.current_logprobs - batch.proximal_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    shared = mean_by(log_ratio.detach(), batch.segment(options.segment))
    ratio = (shared + batch.current_logprobs - batch.current_logprobs.detach()).exp()
    loss = -clipped_objective(ratio, batch.advantages, options.clip_low, options.clip_high)
    return TokenLoss(loss=loss, clipped=_outside(ratio, batch.advantages, 1 - options.clip_low, 1 + options.clip_high))


class M2poOptions(Config):
    """Options of `m2po`."""

    budget: float = Field(default=0.04, gt=0)
    """Largest mean square of the log ratios of harmful tokens."""
    least_low: float = Field(default=0.3, gt=0, lt=1)
    """The lower bound of the ratio is never above `1 - least_low`."""
    least_high: float = Field(default=0.5, gt=0)
    """The upper bound is never below `1 + least_high`."""
    over: Literal["sample", "microbatch"] = "sample"
    """Tokens that share a budget. `microbatch` is the published code, whose loss depends on the packing."""


@row(
    POLICY_LOSSES,
    "m2po",
    "-min(r A, clip(r, exp(-t), exp(t)) A), t: mean of min((log r)^2, t^2) = {budget} over harmful tokens",
)
def m2po(batch: LossBatch, options: M2poOptions) -> TokenLoss:
    """`ppo` with the bounds exp(-t) and exp(t), as tight as the second moment of harmful tokens needs (arXiv 2510.01161).

    Harmful tokens already moved where A pushes them: A > 0 and r > 1, or A < 0 and r < 1. t is the largest with a mean of
    min((log r)^2, t^2) over them of at most `budget`. This is the loss of the paper's own code; `m2po_mask` is the other
    published form.
    """
    log_ratio = (batch.current_logprobs - batch.proximal_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    squares = log_ratio.detach().square()
    harmful = batch.advantages.sign() * log_ratio.detach() > 0
    bound = largest_square(squares, harmful, batch.segment(options.over), options.budget).sqrt()
    lowest = (-bound).exp().minimum(bound.new_tensor(1 - options.least_low))
    highest = bound.exp().maximum(bound.new_tensor(1 + options.least_high))
    ratio = log_ratio.exp()
    clipped = ratio.maximum(lowest).minimum(highest)
    loss = -(ratio * batch.advantages).minimum(clipped * batch.advantages)
    return TokenLoss(
        loss=loss, metrics={"harmful": mean(harmful)}, clipped=_outside(ratio, batch.advantages, lowest, highest)
    )


class CispoOptions(Config):
    """Options of `cispo`."""

    clip_high: float = Field(default=4.0, gt=0)
    """Ratios above `1 + clip_high` are cut to it."""


@row(POLICY_LOSSES, "cispo", "-A sg(min(r, 1 + {clip_high})) log pi")
def cispo(batch: LossBatch, options: CispoOptions) -> TokenLoss:
    """-A sg(min(r, 1 + clip_high)) log pi (MiniMax, arXiv 2506.13585, equation 4, without a lower bound)."""
    ratio = importance_ratio(batch.current_logprobs.detach(), batch.proximal_logprobs)
    cut = ratio > 1 + options.clip_high
    loss = -batch.advantages * ratio.clamp(max=1 + options.clip_high) * batch.current_logprobs
    return TokenLoss(loss=loss, metrics={"cut": mean(cut)})


class SapoOptions(Config):
    """Options of `sapo`."""

    positive: float = Field(default=1.0, gt=0)
    """Temperature for positive advantages."""
    negative: float = Field(default=1.05, gt=0)
    """Temperature for the others."""


@row(POLICY_LOSSES, "sapo", "-A (4 / t) sigmoid(t (r - 1)), t = {positive} where A > 0, else {negative}")
def sapo(batch: LossBatch, options: SapoOptions) -> TokenLoss:
    """-A (4 / t) sigmoid(t (r - 1)): a soft gate instead of a clip (Gao et al., arXiv 2511.20347, equation 5)."""
    ratio = importance_ratio(batch.current_logprobs, batch.proximal_logprobs)
    temperature = chosen(batch.advantages > 0, options.positive, options.negative, ratio)
    return TokenLoss(loss=-batch.advantages * (temperature * (ratio - 1)).sigmoid() * 4 / temperature)


class DppoTvOptions(Config):
    """Options of `dppo_tv`."""

    low: float = Field(default=0.2, gt=0, le=1)
    """Largest fall of a token's probability before a negative advantage stops counting."""
    high: float = Field(default=0.2, gt=0, le=1)
    """Largest rise before a positive one stops counting."""
    cap: float = Field(default=20.0, gt=0)
    """Largest weight current / behavior."""


@row(
    POLICY_LOSSES,
    "dppo_tv",
    "-A sg(min(w, {cap})) log pi, 0 where A > 0 and pi - mu > {high}, or A <= 0 and pi - mu < -{low}",
    corrects=True,
)
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


class AnchoredOptions(PpoOptions):
    """Options of `anchored`."""

    low: float = Field(default=0.2, gt=0, le=1)
    """Fall of a token's probability since it was sampled at which a negative advantage stops counting."""
    low_per_version: float | None = Field(default=None, gt=0, le=1)
    """Allowed fall for each version of a token's age, fresh ones being of age 1, up to `low`; null: `low` at every age."""
    plateau: bool = False
    """Whether a negative advantage counts in full up to half of the allowed fall."""


@row(
    POLICY_LOSSES,
    "anchored",
    "-min(r A, clip(r, 1 - {clip_low}, 1 + {clip_high}) A), but -A sg(r s) log pi where A < 0, "
    "s = clip(1 - (mu - pi) / {low}, -1, 1)",
)
def anchored(batch: LossBatch, options: AnchoredOptions) -> TokenLoss:
    """`ppo` where A >= 0, else -A sg(r s) log pi with s = 1 - (mu - pi) / low, from -1 to 1.

    Times the correction o / mu, a negative advantage has the gradient of |A| / (2 low mu) (pi - (mu - low))^2 where s is not
    cut: the token falls by `low` since it was sampled, however many batches push it, and returns if it fell further. That is
    half of the quadratic of DRPO (arXiv 2606.09821); PPO is the other. With a `plateau`, s = 2 (1 - (mu - pi) / low).
    """
    current = batch.current_logprobs.detach()
    fall = batch.behavior_logprobs.exp() - current.exp()
    allowed = current.new_tensor(options.low)
    if options.low_per_version is not None:
        allowed = (options.low_per_version * (1 + batch.ages).to(current.dtype)).clamp(max=options.low)
    share = ((1 - fall / allowed) * (2 if options.plateau else 1)).clamp(-1.0, 1.0)
    weight = share * importance_ratio(current, batch.proximal_logprobs)
    rises, falls = ppo(batch, options), batch.advantages < 0
    assert rises.clipped is not None
    return TokenLoss(
        loss=(-batch.advantages * weight * batch.current_logprobs).where(falls, rises.loss),
        clipped=(share <= 0).where(falls, rises.clipped),
        metrics={"turned": mean(falls & (share < 0))},
    )


class VespoOptions(Config):
    """Options of `vespo`."""

    power_positive: float = Field(default=2.0, ge=0)
    """k for advantages of at least 0."""
    decay_positive: float = Field(default=3.0, ge=0)
    """lambda for advantages of at least 0."""
    power_negative: float = Field(default=3.0, ge=0)
    """k for negative advantages."""
    decay_negative: float = Field(default=2.0, ge=0)
    """lambda for negative advantages."""
    segment: Literal["turn", "sample"] = "sample"
    """Tokens whose weights are multiplied."""


@row(POLICY_LOSSES, "vespo", "-A sg(exp(l) W^k exp(-l W)) log pi, W = product of w over the {segment}", corrects=True)
def vespo(batch: LossBatch, options: VespoOptions) -> TokenLoss:
    """-A sg(phi) log pi, phi = exp(l) W^k exp(-l W), W the product of a segment's w (VESPO, arXiv 2602.10693).

    phi is 1 at W = 1 and falls on both sides where k = l. Weights of long segments are not normalized by length.
    """
    log_ratio = (batch.current_logprobs.detach() - batch.behavior_logprobs).clamp(-20.0, 20.0)
    together = sum_by(log_ratio, batch.segment(options.segment)).clamp(LOWEST_LOG_WEIGHT, HIGHEST_LOG_WEIGHT)
    rises = batch.advantages >= 0
    power = chosen(rises, options.power_positive, options.power_negative, together)
    decay = chosen(rises, options.decay_positive, options.decay_negative, together)
    phi = (decay + power * together - decay * together.exp()).exp()
    return TokenLoss(loss=-batch.advantages * phi * batch.current_logprobs, metrics={"segment_weight": mean(phi)})


@row(POLICY_LOSSES, "topr", "-A log pi where A > 0, else -A sg(min(w, 1)) log pi", corrects=True)
def topr(batch: LossBatch, options: NoOptions) -> TokenLoss:
    """-A log pi where A > 0, -A sg(min(w, 1)) log pi elsewhere (Le Roux et al., arXiv 2503.14286, TOPR, by token)."""
    weight = importance_ratio(batch.current_logprobs.detach(), batch.behavior_logprobs).clamp(max=1.0)
    weight = weight.masked_fill(batch.advantages > 0, 1.0)
    return TokenLoss(loss=-batch.advantages * weight * batch.current_logprobs)


class KimiOptions(Config):
    """Options of `kimi`."""

    tau: float = Field(default=0.1, ge=0)
    """Weight of the square of the log ratio."""


@row(POLICY_LOSSES, "kimi", "-A log pi + {tau} / 2 (log w)^2", dense=True, corrects=True)
def kimi(batch: LossBatch, options: KimiOptions) -> TokenLoss:
    """-A log pi + tau / 2 (log pi - log mu)^2 (Kimi k1.5, arXiv 2501.12599, equation 3, by token)."""
    log_weight = batch.current_logprobs - batch.behavior_logprobs
    return TokenLoss(
        loss=-batch.advantages * batch.current_logprobs + options.tau / 2 * log_weight.square(),
        metrics={"square": mean(log_weight.square())},
    )


@row(POLICY_LOSSES, "reinforce", "-A log pi")
def reinforce(batch: LossBatch, options: NoOptions) -> TokenLoss:
    """-A log pi (Williams 1992): no trust region."""
    return TokenLoss(loss=-batch.advantages * batch.current_logprobs)


def clipped_objective(ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> Tensor:
    """Return min(u * A, clip(u, 1 - clip_low, 1 + clip_high) * A) for each token, [..] (arXiv 1707.06347, equation 7)."""
    return (ratio * advantages).minimum(ratio.clamp(1 - clip_low, 1 + clip_high) * advantages)


def largest_square(squares: Tensor, counted: Tensor, share: Tensor, budget: float) -> Tensor:
    """Return, at each token, the largest c with a mean of min(square, c) of at most `budget` over the counted of its share.

    Where no bound is needed, c is the square of `MAX_LOG_RATIO`. All are [T]; no gradient.
    """
    exact = squares.masked_fill(~counted, 0.0).double()
    order = ascending_in_shares(exact, share)
    sorted_squares, sorted_share, weight = exact[order], share[order], counted[order].double()
    totals = exact.new_zeros(len(share)).index_add(0, sorted_share, weight)
    below = running_sum(sorted_squares, sorted_share)
    left = totals[sorted_share] - running_sum(weight, sorted_share)
    # With c at this square, the tokens above it add c each. The mean grows with c: the bound lies after the last that fits.
    fits = (below + left * sorted_squares <= budget * totals[sorted_share]) & (weight > 0)
    spent = exact.new_zeros(len(share)).index_add(0, sorted_share, sorted_squares.masked_fill(~fits, 0.0))
    fitting = exact.new_zeros(len(share)).index_add(0, sorted_share, fits.double())
    remaining = totals - fitting
    bound = ((budget * totals - spent) / remaining.clamp(min=1)).masked_fill(remaining <= 0, MAX_LOG_RATIO**2)
    return bound[share].to(squares.dtype)


def _outside(ratio: Tensor, advantages: Tensor, low: Tensor | float, high: Tensor | float) -> Tensor:
    return ((advantages > 0) & (ratio > high)) | ((advantages < 0) & (ratio < low))
