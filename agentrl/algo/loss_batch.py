"""The input and the results of the slots that run in the trainer: losses, corrections and terms.

Invariant: a batch holds only tokens of the loss, of whole samples. A turn's tokens stand in one sample; the other samples of
its episode may stand in another minibatch. Metrics are sums with counts, or maxima, so they add up over microbatches and
ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor


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
    chosen = values.detach().double()
    if mask is None:
        return Metric("mean", chosen.sum(), torch.full_like(chosen.sum(), chosen.numel()))
    return Metric("mean", torch.where(mask, chosen, 0.0).sum(), mask.sum().double())


def maximum(values: Tensor) -> Metric:
    """Return the largest of `values`, [T]."""
    chosen = values.detach().double()
    lowest = chosen.new_full((1,), -torch.inf)
    return Metric("maximum", torch.cat([chosen, lowest]).amax(), chosen.new_zeros(()))


def sum_by(values: Tensor, ids: Tensor) -> Tensor:
    """Return at each token the sum of `values`, [T], over the tokens of the same id, 0 to T - 1; differentiable."""
    return values.new_zeros(len(values)).index_add(0, ids, values)[ids]


def mean_by(values: Tensor, ids: Tensor) -> Tensor:
    """Return at each token the mean of `values`, [T], over the tokens of the same id; differentiable."""
    return sum_by(values, ids) / sum_by(torch.ones_like(values), ids)
