"""What losses, corrections and terms get and return, and the functions of tensors that they are written with.

Invariant: the driver reads the tables of slots, so nothing here imports torch before it computes. A batch holds only tokens
of the loss, of whole samples. A turn's tokens stand in one sample; the other samples of its episode may stand in another
minibatch. Metrics are sums with counts, or maxima, so they add up over microbatches and ranks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import Tensor

MAX_LOG_RATIO = 60.0
"""Log ratios are clamped to +-60 before `exp`: exp(60) = 1e26 times an advantage is finite."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossTotals:
    """The size of a whole minibatch, over all microbatches and ranks."""

    tokens: int
    """Tokens of the loss."""
    turns: int
    """Turns with such a token; a turn that branches share counts once."""
    samples: int
    """Samples with such a token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossBatch:
    """The T tokens of the loss in a microbatch; gradients flow to `current_logprobs`, `entropy` and `values` alone."""

    current_logprobs: Tensor
    """[T] nats, under the weights being trained."""
    proximal_logprobs: Tensor
    """[T] nats, under the weights before the batch's first step, or what `algorithm.proximal` puts in their place."""
    behavior_logprobs: Tensor
    """[T] nats, as the server reported them."""
    advantages: Tensor
    """[T] float."""
    ages: Tensor
    """[T] int: versions between the policy that sampled the token and the trainer's."""
    turn: Tensor
    """[T] int: turns of the microbatch, numbered from 0."""
    sample: Tensor
    """[T] int: samples of the microbatch, numbered from 0."""
    group: Tensor
    """[T] int: groups of the microbatch, numbered from 0."""
    role: Tensor
    """[T] int: roles of the microbatch, numbered from 0 in the order of their names."""
    player: Tensor
    """[T] int: players of the microbatch, numbered from 0 in the order of their names."""
    rewards: Tensor
    """[T] float: the return of the token's episode."""
    totals: LossTotals
    entropy: Tensor | None = None
    """[T] nats, of the whole next-token distribution; where a slot needs it."""
    reference_logprobs: Tensor | None = None
    """[T] nats, under a reference model; where a slot needs them."""
    values: Tensor | None = None
    """[T] returns that a critic expects before each token; where a slot needs them."""
    proximal_values: Tensor | None = None
    """[T] float: the same under the weights before the batch's first step."""
    value_targets: Tensor | None = None
    """[T] float: targets of the critic."""

    def segment(self, name: Literal["turn", "sample", "microbatch"]) -> Tensor:
        """Return [T] int: the number of the turn or the sample of each token, or 0 for all."""
        if name == "microbatch":
            return self.sample.new_zeros(self.sample.shape)
        return self.turn if name == "turn" else self.sample

    def sum_by_turn(self, values: Tensor) -> Tensor:
        """Return at each token the sum of `values`, [T], over its turn."""
        return sum_by(values, self.turn)

    def mean_by_turn(self, values: Tensor) -> Tensor:
        """Return at each token the mean of `values`, [T], over its turn."""
        return mean_by(values, self.turn)

    def sum_by_sample(self, values: Tensor) -> Tensor:
        """Return at each token the sum of `values`, [T], over its sample."""
        return sum_by(values, self.sample)

    def mean_by_sample(self, values: Tensor) -> Tensor:
        """Return at each token the mean of `values`, [T], over its sample."""
        return mean_by(values, self.sample)


@dataclass(frozen=True, slots=True)
class Metric:
    """A figure that adds up over microbatches and ranks: a mean as sum and count, or a maximum."""

    kind: Literal["mean", "maximum"]
    value: Tensor
    """Scalar: the sum, or the maximum; minus infinity is the maximum of nothing."""
    count: Tensor
    """Scalar: values in the sum."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLoss:
    """The result of a policy loss or a term."""

    loss: Tensor
    """[T] loss of each token, before weights and aggregation."""
    clipped: Tensor | None = None
    """[T] bool: tokens whose gradient the loss stops; None: none."""
    metrics: Mapping[str, Metric] = field(default_factory=dict[str, Metric])


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """The result of a correction."""

    weight: Tensor
    """[T] factor of the token's loss, without gradient."""
    keep: Tensor
    """[T] bool: False takes the token out of the loss."""
    capped: Tensor | None = None
    """[T] bool: kept tokens whose weight was limited; None: none."""
    metrics: Mapping[str, Metric] = field(default_factory=dict[str, Metric])


def mean(values: Tensor, mask: Tensor | None = None) -> Metric:
    """Return the mean of `values`, [T] float or bool, over the tokens where `mask` is True."""
    exact = values.detach().double()
    if mask is None:
        return Metric("mean", exact.sum(), exact.new_full((), exact.numel()))
    return Metric("mean", exact.masked_fill(~mask, 0.0).sum(), mask.sum().double())


def maximum(values: Tensor) -> Metric:
    """Return the largest of `values`, [T]."""
    exact = values.detach().double()
    largest = exact.amax() if exact.numel() else exact.new_full((), -math.inf)
    return Metric("maximum", largest, exact.new_zeros(()))


def importance_ratio(numerator_logprobs: Tensor, denominator_logprobs: Tensor) -> Tensor:
    """Return exp(numerator - denominator), [..], with the logarithm clamped to +-`MAX_LOG_RATIO`."""
    return (numerator_logprobs - denominator_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def sum_by(values: Tensor, ids: Tensor) -> Tensor:
    """Return at each token the sum of `values`, [T], over the tokens of the same id, 0 to T - 1; differentiable."""
    return values.new_zeros(len(values)).index_add(0, ids, values)[ids]


def mean_by(values: Tensor, ids: Tensor) -> Tensor:
    """Return at each token the mean of `values`, [T], over the tokens of the same id; differentiable."""
    return sum_by(values, ids) / sum_by(values.new_ones(len(values)), ids)


def ascending_in_shares(values: Tensor, share: Tensor) -> Tensor:
    """Return the order, [T] int, that sorts by share, the number of what a token shares a bound with, and then by value."""
    by_value = values.argsort(stable=True)
    return by_value[share[by_value].argsort(stable=True)]


def running_sum(values: Tensor, sorted_share: Tensor) -> Tensor:
    """Return the sums of `values`, [T], from the first token of each share to each token, itself included."""
    import torch  # the driver, which has none, imports this module too

    running = values.cumsum(0)
    starts = torch.searchsorted(sorted_share, sorted_share)
    return running - running[starts] + values[starts]


def chosen(where: Tensor, one: float, other: float, like: Tensor) -> Tensor:
    """Return `one` where `where` is True, else `other`, in the dtype of `like`, which two bare numbers would lose."""
    return like.new_tensor(one).where(where, like.new_tensor(other))
