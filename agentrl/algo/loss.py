"""The decoupled PPO loss and its diagnostics.

Invariant: the loss is a sum over tokens divided by a number that the caller gives, so it does not depend on how a minibatch
is packed, padded, ordered or split into microbatches. Values outside `loss_mask` have no effect, even when they are NaN.

Source: AReaL, arXiv 2505.24298, section 5; the separation of the policy that sampled from the centre of the trust region:
Hilton et al., arXiv 2110.00641; the clipped objective: Schulman et al., arXiv 1707.06347, equation 7. With
u = exp(current - proximal), w = exp(proximal - behavior) and N the loss tokens of the minibatch:

    loss = - sum(loss_mask * w_capped * min(u * A, clip(u, 1 - clip_low, 1 + clip_high) * A)) / N

w carries no gradient. Where behavior equals proximal, w is 1 and this is PPO, exactly; where current equals proximal too
(one minibatch), the gradient is that of REINFORCE with the advantage as given. Every tensor here has one shape, [..]: packed
[T] or padded [B, L]. Log-probs are in nats, at the temperature the token was sampled with.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from agentrl.algo.config import AlgorithmConfig
from agentrl.errors import InvariantError

MAX_LOG_RATIO = 60.0
"""Log ratios are clamped to +-60 before `exp`: exp(60) = 1e26 times an advantage is finite."""


class BehaviorWeights(NamedTuple):
    """The weight that corrects each token for the policy that sampled it."""

    raw: Tensor
    """[..] w = exp(proximal - behavior)."""
    capped: Tensor
    """[..] the factor of the objective: w, the cap, or 0."""
    over: Tensor
    """[..] bool: w is above the cap."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossMetrics:
    """Diagnostics of some tokens, which add up over microbatches; `combine` makes figures of them."""

    sums: Tensor
    """[len(SUMS)] float64."""
    maxima: Tensor
    """[len(MAXIMA)] float64; 0 without tokens."""


class LossOutput(NamedTuple):
    """The result of `decoupled_ppo_loss`."""

    loss: Tensor
    """Scalar float32 (float64 for float64 log-probs): the part of this microbatch; the parts add up to the loss."""
    metrics: LossMetrics


_TOTALS = (
    "tokens",
    "loss",
    "k1",
    "k3",
    "weight",
    "weight_squared",
    "difference",
    "positive",
    "negative",
    "clipped_positive",
    "clipped_negative",
    "capped_positive",
    "capped_negative",
    "fresh",
    "fresh_difference",
    "interrupted",
    "interrupted_fresh",
    "interrupted_fresh_difference",
    "weighted_surprise",
)
_AGE_STARTS = (0, 1, 2, 3, 4, 8)
_TURN_STARTS = (0, 1, 2, 3, 4, 8, 16)
_AGE_TERMS = ("tokens", "weight", "weight_squared", "difference", "signed", "clipped", "capped")
_TURN_TERMS = ("weight", "weighted_surprise")


def bucket_labels(starts: Sequence[int]) -> tuple[str, ...]:
    """Return a name for each bucket, such as `2_to_3`; each begins at its number and ends before the next."""
    inner = (f"{start}" if end == start + 1 else f"{start}_to_{end - 1}" for start, end in itertools.pairwise(starts))
    return (*inner, f"{starts[-1]}_up")


AGES, TURNS = bucket_labels(_AGE_STARTS), bucket_labels(_TURN_STARTS)
_BREAKDOWN = (
    *(f"{term}_by_age.{label}" for term in _AGE_TERMS for label in AGES),
    *(f"{term}_by_turn.{label}" for term in _TURN_TERMS for label in TURNS),
)
SUMS = (*_TOTALS, *_BREAKDOWN)
MAXIMA = ("ratio", "weight", "difference", "fresh_difference", "interrupted_fresh_difference")


def importance_ratio(numerator_logprobs: Tensor, denominator_logprobs: Tensor) -> Tensor:
    """Return exp(numerator - denominator), [..], with the logarithm clamped to +-`MAX_LOG_RATIO`."""
    return (numerator_logprobs - denominator_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def behavior_weights(
    proximal_logprobs: Tensor, behavior_logprobs: Tensor, cap: float, mode: Literal["clamp", "mask"]
) -> BehaviorWeights:
    """Return w = exp(proximal - behavior), [..], no gradient; above the cap, `capped` is the cap (`clamp`) or 0 (`mask`)."""
    raw = importance_ratio(proximal_logprobs.detach(), behavior_logprobs.detach())
    over = raw > cap
    capped = raw.clamp(max=cap) if mode == "clamp" else raw.masked_fill(over, 0.0)
    return BehaviorWeights(raw=raw, capped=capped, over=over)


def clipped_objective(ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> Tensor:
    """Return min(u * A, clip(u, 1 - clip_low, 1 + clip_high) * A) for each token, [..] (arXiv 1707.06347, equation 7)."""
    return torch.minimum(ratio * advantages, ratio.clamp(1 - clip_low, 1 + clip_high) * advantages)


def decoupled_ppo_loss(
    current_logprobs: Tensor,
    proximal_logprobs: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    *,
    num_loss_tokens: int,
    config: AlgorithmConfig,
    fresh: Tensor | None = None,
    interrupted: Tensor | None = None,
    ages: Tensor | None = None,
    turns: Tensor | None = None,
) -> LossOutput:
    """Return the loss of one microbatch and its diagnostics; call backward on each, and step once per minibatch.

    Args:
        current_logprobs: float, under the weights being trained; the only argument that gets a gradient.
        proximal_logprobs: float, under the weights just before the batch's first step.
        behavior_logprobs: float, as the server reported them.
        advantages: float.
        loss_mask: bool.
        num_loss_tokens: N, at least 1: the loss tokens of the minibatch, of which this may be a part.
        config: clip and cap settings.
        fresh: bool, tokens sampled by the proximal policy, whose two log-probs should be equal.
        interrupted: bool, tokens before which the weights had changed within their model call.
        ages: int, versions between the policy that sampled the token and the trainer's.
        turns: int, number of the token's turn in its episode, from 0.
    """
    given = {"proximal": proximal_logprobs, "behavior": behavior_logprobs, "advantages": advantages, "loss_mask": loss_mask}
    optional = {"fresh": fresh, "interrupted": interrupted, "ages": ages, "turns": turns}
    given |= {name: tensor for name, tensor in optional.items() if tensor is not None}
    _check_shapes(current_logprobs, given, num_loss_tokens)
    # Unselected values become 0 before any arithmetic: 0 * NaN is NaN, and so is its gradient.
    current = _selected(current_logprobs, loss_mask)
    proximal = _selected(proximal_logprobs.detach(), loss_mask)
    behavior = _selected(behavior_logprobs.detach(), loss_mask)
    advantages = _selected(advantages.detach(), loss_mask)
    ratio = importance_ratio(current, proximal)
    weights = behavior_weights(proximal, behavior, config.behavior_weight_cap, config.behavior_weight_mode)
    objective = clipped_objective(ratio, advantages, config.clip_low, config.clip_high)
    loss = -(weights.capped * objective * loss_mask).sum() / num_loss_tokens
    with torch.no_grad():
        sides = _sides(ratio, advantages, loss_mask, weights.over, config)
        flags = _flags(loss_mask, fresh, interrupted)
        surprise = {"weighted_surprise": weights.raw * -proximal}
        more = sides | surprise | flags
        metrics = _measure(loss_mask, proximal - behavior, weights.raw, ratio, more, loss, ages=ages, turns=turns)
    return LossOutput(loss=loss, metrics=metrics)


def combine(metrics: Sequence[LossMetrics]) -> dict[str, float]:
    """Return the diagnostics of all tokens of several microbatches, or of several steps. One transfer from the device.

    docs/reference/metrics.md explains each; a mean over no tokens is 0. `loss` is a sum: over one step's microbatches that
    is its loss. KL(behavior || proximal) in nats per token by the estimators k1 = -log w and k3 = w - 1 - log w (Schulman
    2020, "Approximating KL divergence"). `effective_sample_size`: (sum w)^2 / (n sum w^2) (Kong 1992). `entropy` of the
    proximal policy: the mean of -proximal weighted by w, as E_behavior[w * -log proximal] is the entropy.
    """
    if not metrics:
        return {}
    sums_tensor = torch.stack([one.sums for one in metrics]).sum(0)
    maxima_tensor = torch.stack([one.maxima for one in metrics]).amax(0)
    flat: list[float] = torch.cat([sums_tensor, maxima_tensor]).tolist()
    return _described(dict(zip(SUMS, flat, strict=False)), dict(zip(MAXIMA, flat[len(SUMS) :], strict=True)))


def _described(sums: Mapping[str, float], maxima: Mapping[str, float]) -> dict[str, float]:
    def mean(total: str, count: str = "tokens") -> float:
        return sums[total] / sums[count] if sums[count] else 0.0

    combined = {
        "num_loss_tokens": sums["tokens"],
        "loss": sums["loss"],
        "kl_behavior_proximal_k1": mean("k1"),
        "kl_behavior_proximal_k3": mean("k3"),
        "entropy": mean("weighted_surprise", "weight"),
        "effective_sample_size": mean("weight") * sums["weight"] / (sums["weight_squared"] or 1.0),
        "behavior_weight_mean": mean("weight"),
        "behavior_weight_max": maxima["weight"],
        "ratio_max": maxima["ratio"],
        "behavior_log_weight_mean": mean("difference"),
        "behavior_log_weight_max": maxima["difference"],
        "num_fresh_tokens": sums["fresh"],
        "num_interrupted_tokens": sums["interrupted"],
        "num_interrupted_fresh_tokens": sums["interrupted_fresh"],
    }
    for sign in ("positive", "negative"):
        combined[f"clip_fraction_{sign}"] = mean(f"clipped_{sign}", sign)
        combined[f"cap_fraction_{sign}"] = mean(f"capped_{sign}", sign)
    for name, which in (("logprob", "fresh"), ("interrupted", "interrupted_fresh")):
        if sums[which]:
            combined[f"mean_{name}_difference"] = mean(f"{which}_difference", which)
            combined[f"max_{name}_difference"] = maxima[f"{which}_difference"]
    return combined | _breakdown_figures(sums)


def _sides(ratio: Tensor, advantages: Tensor, mask: Tensor, over: Tensor, config: AlgorithmConfig) -> dict[str, Tensor]:
    positive, negative = mask & (advantages > 0), mask & (advantages < 0)
    return {
        "positive": positive,
        "negative": negative,
        "clipped_positive": positive & (ratio > 1 + config.clip_high),
        "clipped_negative": negative & (ratio < 1 - config.clip_low),
        "capped_positive": positive & over,
        "capped_negative": negative & over,
    }


def _flags(mask: Tensor, fresh: Tensor | None, interrupted: Tensor | None) -> dict[str, Tensor]:
    young = torch.zeros_like(mask) if fresh is None else fresh & mask
    cut = torch.zeros_like(mask) if interrupted is None else interrupted & mask
    return {"fresh": young, "interrupted": cut, "interrupted_fresh": cut & young}


def _measure(
    mask: Tensor,
    log_weight: Tensor,
    weight: Tensor,
    ratio: Tensor,
    more: dict[str, Tensor],
    loss: Tensor,
    *,
    ages: Tensor | None,
    turns: Tensor | None,
) -> LossMetrics:
    difference = log_weight.abs()
    terms = {
        "tokens": mask,
        "k1": -log_weight,
        "k3": torch.expm1(log_weight.clamp(max=MAX_LOG_RATIO)) - log_weight,
        "weight": weight * mask,
        "weight_squared": weight.double().square() * mask,
        "difference": difference,
        "fresh_difference": difference * more["fresh"],
        "interrupted_fresh_difference": difference * more["interrupted_fresh"],
        **more,
    }
    zero = torch.zeros((), dtype=torch.float64, device=mask.device)
    totals = {name: term.sum(dtype=torch.float64) for name, term in terms.items()} | {"loss": loss.double()}
    peaks = {"ratio": ratio * mask} | {name: terms[name] for name in MAXIMA if name != "ratio"}
    return LossMetrics(
        sums=torch.cat([torch.stack([totals[name] for name in _TOTALS]), _breakdown_sums(terms, ages, turns)]),
        maxima=torch.stack([peaks[name].amax().double() if mask.numel() else zero for name in MAXIMA]),
    )


def _breakdown_sums(terms: Mapping[str, Tensor], ages: Tensor | None, turns: Tensor | None) -> Tensor:
    """Return [len(_BREAKDOWN)] float64 from the [..] `terms`, 0 outside the loss mask; 0 for what is not given."""
    sides = {"signed": terms["positive"] | terms["negative"]}
    sides |= {name: terms[f"{name}_positive"] | terms[f"{name}_negative"] for name in ("clipped", "capped")}
    by_age = _bucket_sums({**terms, **sides}, _AGE_TERMS, ages, _AGE_STARTS)
    return torch.cat([by_age, _bucket_sums(terms, _TURN_TERMS, turns, _TURN_STARTS)])


def _breakdown_figures(sums: Mapping[str, float]) -> dict[str, float]:
    figures: dict[str, float] = {}
    for label in AGES:
        tokens, weight, squared, difference, signed, clipped, capped = (
            sums[f"{term}_by_age.{label}"] for term in _AGE_TERMS
        )
        if tokens:
            figures[f"loss_tokens_by_age.{label}"] = tokens
            figures[f"effective_sample_size_by_age.{label}"] = weight**2 / (tokens * squared) if squared else 0.0
            figures[f"behavior_log_weight_mean_by_age.{label}"] = difference / tokens
        if signed:
            figures[f"clip_fraction_by_age.{label}"] = clipped / signed
            figures[f"cap_fraction_by_age.{label}"] = capped / signed
    for label in TURNS:
        weight, surprise = (sums[f"{term}_by_turn.{label}"] for term in _TURN_TERMS)
        if weight:
            figures[f"entropy_by_turn.{label}"] = surprise / weight
    return figures


def _bucket_sums(terms: Mapping[str, Tensor], names: Sequence[str], numbers: Tensor | None, starts: Sequence[int]) -> Tensor:
    """Return the sum of each term in each bucket, [len(names) * len(starts)] float64."""
    device = terms["tokens"].device
    if numbers is None:
        return torch.zeros(len(names) * len(starts), dtype=torch.float64, device=device)
    bounds = torch.tensor(starts, device=device)
    bucket = torch.bucketize(numbers.reshape(-1).long(), bounds, right=True) - 1
    members = (bucket[:, None] == torch.arange(len(starts), device=device)).double()
    return (torch.stack([terms[name].reshape(-1).double() for name in names]) @ members).reshape(-1)


def _selected(values: Tensor, mask: Tensor) -> Tensor:
    """Return `values` in at least float32, 0 where `mask` is False."""
    wide = values if values.dtype == torch.float64 else values.float()
    return torch.where(mask, wide, 0.0)


def _check_shapes(current: Tensor, given: dict[str, Tensor], num_loss_tokens: int) -> None:
    if num_loss_tokens < 1:
        raise InvariantError(
            f"expected num_loss_tokens of at least 1, got {num_loss_tokens}; a batch without any is skipped"
        )
    for name, tensor in given.items():
        if tensor.shape != current.shape:
            raise InvariantError(f"expected {name} of the shape of current, {[*current.shape]}, got {[*tensor.shape]}")
    if given["loss_mask"].dtype != torch.bool:
        raise InvariantError(f"expected a loss_mask of bool, got {given['loss_mask'].dtype}")
