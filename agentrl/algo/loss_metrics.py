"""The diagnostics of a loss: figures of its tokens.

Invariant: diagnostics are sums and maxima over tokens, so they add up over microbatches and ranks. Every tensor here has one
shape, [..]. Log-probs are in nats, at the temperature the token was sampled with. The separation of the policy that sampled
from the center of the trust region: Hilton et al., arXiv 2110.00641; AReaL, arXiv 2505.24298, section 5.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from agentrl.algo.loss_batch import MAX_LOG_RATIO, Metric

FALL = 0.2
"""Fall of a token's probability since it was sampled that counts as one: the option `low` of `anchored` and `dppo_tv`."""
MAX_SAMPLE_LOG_WEIGHT = 300.0
"""Log weights of whole samples are clamped to +-300, so that their squares add up in float64."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossMetrics:
    """Diagnostics of some tokens, which add up over microbatches; `combine` makes figures of them."""

    sums: Tensor
    """[len(SUMS)] float64."""
    maxima: Tensor
    """[len(MAXIMA)] float64; 0 without tokens."""
    own: Mapping[str, Metric] = field(default_factory=dict[str, Metric])
    """The metrics of slots, by `FUNCTION.NAME`."""
    faults: Tensor | None = None
    """[1 + functions] float64: microbatches with unusable inputs, and with unusable results of each function."""

    def zeroed(self) -> LossMetrics:
        """Return the diagnostics of no tokens, with the same names."""
        own = {
            name: Metric(
                one.kind,
                torch.full_like(one.value, -torch.inf) if one.kind == "maximum" else torch.zeros_like(one.value),
                torch.zeros_like(one.count),
            )
            for name, one in self.own.items()
        }
        faults = None if self.faults is None else torch.zeros_like(self.faults)
        return LossMetrics(sums=torch.zeros_like(self.sums), maxima=torch.zeros_like(self.maxima), own=own, faults=faults)


@dataclass(frozen=True, slots=True, kw_only=True)
class Marks:
    """Properties of tokens that only diagnostics read, [T] each."""

    fresh: Tensor | None = None
    """bool: sampled by the proximal policy, so that its two log-probs should be equal."""
    interrupted: Tensor | None = None
    """bool: the weights had changed before it within its model call."""
    ages: Tensor | None = None
    """int: versions between the policy that sampled it and the trainer's."""
    turns: Tensor | None = None
    """int: number of its turn in the episode, from 0."""


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
    "moved_positive",
    "fallen_negative",
    "fresh",
    "fresh_difference",
    "interrupted",
    "interrupted_fresh",
    "interrupted_fresh_difference",
    "weighted_surprise",
    "samples",
    "sample_weight",
    "sample_weight_squared",
)
_AGE_STARTS = (0, 1, 2, 3, 4, 8)
_TURN_STARTS = (0, 1, 2, 3, 4, 8, 16)
_AGE_TERMS = (
    "tokens",
    "weight",
    "weight_squared",
    "difference",
    "signed",
    "clipped",
    "capped",
    "negative",
    "fallen_negative",
)
_TURN_TERMS = ("weight", "weighted_surprise")


def bucket_labels(starts: Sequence[int]) -> tuple[str, ...]:
    """Return a name for each bucket, such as `2_to_3`; each begins at its number and ends before the next."""
    inner = (f"{start}" if end == start + 1 else f"{start}_to_{end - 1}" for start, end in itertools.pairwise(starts))
    return (*inner, f"{starts[-1]}_up")


SAMPLE_WEIGHTS = ("samples", "sample_weight", "sample_weight_squared")
"""Sums over whole samples, in the order of the arguments of `ess_ratio`."""
AGES, TURNS = bucket_labels(_AGE_STARTS), bucket_labels(_TURN_STARTS)
_BREAKDOWN = (
    *(f"{term}_by_age.{label}" for term in _AGE_TERMS for label in AGES),
    *(f"{term}_by_turn.{label}" for term in _TURN_TERMS for label in TURNS),
)
SUMS = (*_TOTALS, *_BREAKDOWN)
COUNTS = ("num_", "loss_tokens_by_age")
"""Beginnings of the names of figures that count tokens."""
MAXIMA = ("ratio", "weight", "difference", "fresh_difference", "interrupted_fresh_difference")


def ess_ratio(count: float, total: float, squares: float) -> float:
    """Return (sum W)^2 / (n sum W^2) of n weights W, from 1 / n to 1 (Kong 1992); 1 for none.

    Example:
        >>> ess_ratio(4, total=4.0, squares=16.0)
        0.25
    """
    return min(total * total / (count * squares), 1.0) if count else 1.0


def combine(metrics: Sequence[LossMetrics]) -> dict[str, float]:
    """Return the diagnostics of all tokens of several microbatches, or of several steps. One transfer from the device.

    docs/reference/metrics.md explains each; a mean over no tokens is 0. `loss` is a sum: over one step's microbatches that
    is its loss. KL(behavior || proximal) in nats per token by the estimators k1 = -log w and k3 = w - 1 - log w (Schulman
    2020, "Approximating KL divergence"). `effective_sample_size`: (sum w)^2 / (n sum w^2) (Kong 1992). `entropy` of the
    proximal policy: the mean of -proximal weighted by w, as E_behavior[w * -log proximal] is the entropy.
    """
    if not metrics:
        return {}
    total = added(metrics)
    own = list(total.own.values())
    numbers = [number for one in own for number in (one.value, one.count)]
    flat: list[float] = torch.cat([total.sums, total.maxima, *(number.reshape(1) for number in numbers)]).tolist()
    described = _described(dict(zip(SUMS, flat, strict=False)), dict(zip(MAXIMA, flat[len(SUMS) :], strict=False)))
    rest = flat[len(SUMS) + len(MAXIMA) :]
    for name, one, value, count in zip(total.own, own, rest[::2], rest[1::2], strict=True):
        if one.kind == "maximum" and math.isfinite(value):
            described[f"by_slot.{name}"] = value
        elif one.kind == "mean" and count:
            described[f"by_slot.{name}"] = value / count
    return described


def added(metrics: Sequence[LossMetrics]) -> LossMetrics:
    """Return the diagnostics of the tokens of several microbatches, at least one, whose slots have the same metrics."""
    first = metrics[0]
    own: dict[str, Metric] = {}
    for name, one in first.own.items():
        values = torch.stack([each.own[name].value for each in metrics])
        counts = torch.stack([each.own[name].count for each in metrics])
        own[name] = Metric(one.kind, values.amax(0) if one.kind == "maximum" else values.sum(0), counts.sum(0))
    faults = None
    if first.faults is not None:
        faults = torch.stack([each.faults for each in metrics if each.faults is not None]).sum(0)
    return LossMetrics(
        sums=torch.stack([one.sums for one in metrics]).sum(0),
        maxima=torch.stack([one.maxima for one in metrics]).amax(0),
        own=own,
        faults=faults,
    )


def over_ranks(metrics: LossMetrics, add: Callable[[Tensor], Tensor], maximum: Callable[[Tensor], Tensor]) -> LossMetrics:
    """Return the diagnostics of all ranks together; `add` and `maximum` exchange a tensor, and every rank must call it."""
    means = [name for name, one in metrics.own.items() if one.kind == "mean"]
    peaks = [name for name, one in metrics.own.items() if one.kind == "maximum"]
    faults = metrics.sums.new_zeros(0) if metrics.faults is None else metrics.faults
    parts = [torch.stack([metrics.own[name].value, metrics.own[name].count]) for name in means]
    sums = add(torch.cat([metrics.sums, faults, *parts]))
    maxima = maximum(torch.cat([metrics.maxima, *(metrics.own[name].value.reshape(1) for name in peaks)]))
    head, after, rest = sums.split([len(metrics.sums), len(faults), 2 * len(means)])
    own = {name: Metric("mean", *pair.unbind()) for name, pair in zip(means, rest.reshape(-1, 2), strict=True)}
    zero = maxima.new_zeros(())
    own |= {name: Metric("maximum", value, zero) for name, value in zip(peaks, maxima[len(MAXIMA) :], strict=True)}
    return LossMetrics(
        sums=head,
        maxima=maxima[: len(MAXIMA)],
        own={name: own[name] for name in metrics.own},
        faults=None if metrics.faults is None else after,
    )


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
    combined["log_ratio_positive"] = mean("moved_positive", "positive")
    combined["fallen_fraction_negative"] = mean("fallen_negative", "negative")
    for name, which in (("logprob", "fresh"), ("interrupted", "interrupted_fresh")):
        if sums[which]:
            combined[f"mean_{name}_difference"] = mean(f"{which}_difference", which)
            combined[f"max_{name}_difference"] = maxima[f"{which}_difference"]
    if sums["samples"]:
        combined["sample_ess_ratio"] = ess_ratio(*(sums[name] for name in SAMPLE_WEIGHTS))
    return combined | _breakdown_figures(sums)


def measure(
    *,
    log_weight: Tensor,
    proximal: Tensor,
    ratio: Tensor,
    moved: Tensor,
    advantages: Tensor,
    clipped: Tensor | None,
    capped: Tensor | None,
    loss: Tensor,
    sample_log_weights: Tensor,
    marks: Marks,
) -> LossMetrics:
    """Return the diagnostics of [T] tokens.

    `log_weight` is proximal - behavior, `ratio` current / proximal, and `moved` current - behavior. `clipped` and `capped`
    are bool: the tokens whose loss or weight is limited; None: none is. `sample_log_weights` are [..] float64, the log
    weights current / behavior of whole samples; minus infinity is no sample.
    """
    weight = log_weight.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    difference = log_weight.abs()
    none = torch.zeros_like(log_weight, dtype=torch.bool)
    positive, negative = advantages > 0, advantages < 0
    behavior = proximal - log_weight
    clipped = none if clipped is None else clipped
    capped = none if capped is None else capped
    fresh = none if marks.fresh is None else marks.fresh
    interrupted = none if marks.interrupted is None else marks.interrupted
    terms = {
        "tokens": ~none,
        "k1": -log_weight,
        "k3": torch.expm1(log_weight.clamp(max=MAX_LOG_RATIO)) - log_weight,
        "weight": weight,
        "weight_squared": weight.double().square(),
        "difference": difference,
        "positive": positive,
        "negative": negative,
        "clipped_positive": positive & clipped,
        "clipped_negative": negative & clipped,
        "capped_positive": positive & capped,
        "capped_negative": negative & capped,
        "moved_positive": moved.masked_fill(~positive, 0.0),
        "fallen_negative": negative & (behavior.exp() - (behavior + moved).exp() > FALL),
        "fresh": fresh,
        "fresh_difference": difference * fresh,
        "interrupted": interrupted,
        "interrupted_fresh": interrupted & fresh,
        "interrupted_fresh_difference": difference * (interrupted & fresh),
        "weighted_surprise": weight * -proximal,
    }
    samples = _sample_terms(sample_log_weights)
    zero = torch.zeros((), dtype=torch.float64, device=log_weight.device)
    totals = {name: term.sum(dtype=torch.float64) for name, term in (terms | samples).items()}
    totals["loss"] = loss.double()
    peaks = {"ratio": ratio} | {name: terms[name] for name in MAXIMA if name != "ratio"}
    return LossMetrics(
        sums=torch.cat([torch.stack([totals[name] for name in _TOTALS]), _breakdown_sums(terms, marks.ages, marks.turns)]),
        maxima=torch.stack([peaks[name].amax().double() if ratio.numel() else zero for name in MAXIMA]),
    )


def _sample_terms(log_weights: Tensor) -> dict[str, Tensor]:
    is_sample = log_weights != -torch.inf
    weight = log_weights.clamp(-MAX_SAMPLE_LOG_WEIGHT, MAX_SAMPLE_LOG_WEIGHT).exp().masked_fill(~is_sample, 0.0)
    return {"samples": is_sample, "sample_weight": weight, "sample_weight_squared": weight.square()}


def _breakdown_sums(terms: Mapping[str, Tensor], ages: Tensor | None, turns: Tensor | None) -> Tensor:
    """Return [len(_BREAKDOWN)] float64 from the [..] `terms`, 0 outside the loss mask; 0 for what is not given."""
    sides = {"signed": terms["positive"] | terms["negative"]}
    sides |= {name: terms[f"{name}_positive"] | terms[f"{name}_negative"] for name in ("clipped", "capped")}
    by_age = _bucket_sums({**terms, **sides}, _AGE_TERMS, ages, _AGE_STARTS)
    return torch.cat([by_age, _bucket_sums(terms, _TURN_TERMS, turns, _TURN_STARTS)])


def _breakdown_figures(sums: Mapping[str, float]) -> dict[str, float]:
    figures: dict[str, float] = {}
    for label in AGES:
        tokens, weight, squared, difference, signed, clipped, capped, negative, fallen = (
            sums[f"{term}_by_age.{label}"] for term in _AGE_TERMS
        )
        if tokens:
            figures[f"loss_tokens_by_age.{label}"] = tokens
            figures[f"effective_sample_size_by_age.{label}"] = weight**2 / (tokens * squared) if squared else 0.0
            figures[f"behavior_log_weight_mean_by_age.{label}"] = difference / tokens
        if signed:
            figures[f"clip_fraction_by_age.{label}"] = clipped / signed
            figures[f"cap_fraction_by_age.{label}"] = capped / signed
        if negative:
            figures[f"fallen_fraction_by_age.{label}"] = fallen / negative
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
