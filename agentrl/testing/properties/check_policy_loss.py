"""Checks of a policy loss, a term or a correction: packing, extreme ratios, gradients, masks.

Invariant: a check compares a function with itself on the same tokens, with its reference, or with the policy gradient.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

import torch
from pydantic import BaseModel
from torch import Tensor

from agentrl.algo.loss_batch import LossBatch, LossTotals, Metric, TokenLoss, Weights
from agentrl.testing.properties.loss_batches import random_batch, samples_of

Options = TypeVar("Options", bound=BaseModel)
SEEDS = range(2)
EXTREMES = (0.0, -1e-6, -1.0, -50.0, -1e4)
"""Log-probs whose differences are taken in all combinations."""


def check_policy_loss(
    function: Callable[[LossBatch, Options], TokenLoss],
    options: Options,
    *,
    reference: Callable[[LossBatch, Options], Sequence[float]] | None = None,
    dense: bool = False,
    reinforce: bool = True,
) -> None:
    """Fail where the loss of a token depends on the packing, is not finite, or does not train what it should.

    `reference` computes the losses in plain floats, slowly. `dense` says that tokens of advantage 0 have a gradient. With
    `reinforce`, the gradient must be that of -A log pi where all three policies agree; a term is no such loss.

    Raises:
        AssertionError: says which property, on which tokens.
    """
    name = getattr(function, "__name__", "the loss")
    for seed in SEEDS:
        batch = random_batch(seed)
        whole = _losses(function(batch, options), batch, name)
        for order in ([0, 1, 2, 3, 4], [4, 2, 0, 3, 1]):
            _check_split(function, options, batch, whole, order, name)
        if reference is not None:
            expected = torch.tensor(reference(batch, options), dtype=torch.float64)
            _require_close(whole.loss.detach(), expected, 1e-9, f"{name}: the loss is not that of the reference")
            narrow = random_batch(seed, dtype=torch.float32)
            _require_close(
                function(narrow, options).loss.detach().double(), expected, 1e-3, f"{name}: in float32 the loss is another"
            )
        _check_gradient_flow(function, options, batch, name, dense)
    if reinforce:
        _check_direction(function, options, name)
    _check_extremes(lambda batch: function(batch, options).loss, name)


def check_correction(function: Callable[[LossBatch, Options], Weights], options: Options) -> None:
    """Fail where a weight depends on the packing, has a gradient or is not finite, or where fresh data are not left alone.

    Raises:
        AssertionError: says which property, on which tokens.
    """
    name = getattr(function, "__name__", "the correction")
    for seed in SEEDS:
        batch = random_batch(seed)
        whole = _sound_weights(function(batch, options), batch, name)
        for order in ([[0], [1], [2], [3], [4]], [[4, 2], [0, 3, 1]]):
            for samples in order:
                part, at = samples_of(batch, samples)
                got = function(part, options)
                _require_close(got.weight, whole.weight[at], 1e-9, f"{name}: the weight depends on the packing")
                if not torch.equal(got.keep, whole.keep[at]):
                    raise AssertionError(f"{name}: the mask depends on the packing: {got.keep} and {whole.keep[at]}")
        fresh = replace(batch, proximal_logprobs=batch.behavior_logprobs)
        left = function(fresh, options)
        if not bool(left.keep.all()):
            raise AssertionError(f"{name}: it drops tokens of the policy that is trained; expected all of them kept")
        _require_close(left.weight, torch.ones_like(left.weight), 1e-9, f"{name}: fresh tokens have another weight than 1")
    _check_extremes(lambda batch: function(batch, options).weight, name)


def _losses(result: TokenLoss, batch: LossBatch, name: str) -> TokenLoss:
    if result.loss.shape != batch.advantages.shape or not bool(result.loss.isfinite().all()):
        raise AssertionError(
            f"{name}: expected a finite loss for each of {len(batch.advantages)} tokens, got {[*result.loss.shape]}, "
            f"{result.loss.tolist()}"
        )
    return result


def _sound_weights(result: Weights, batch: LossBatch, name: str) -> Weights:
    shape = batch.advantages.shape
    if result.keep.dtype != torch.bool or result.keep.shape != shape or result.weight.shape != shape:
        raise AssertionError(f"{name}: expected [{shape[0]}] weights and a mask of bool, got {result}")
    if result.weight.requires_grad or not bool((result.weight.isfinite() & (result.weight >= 0)).all()):
        raise AssertionError(f"{name}: expected finite weights of at least 0 without a gradient, got {result.weight}")
    return result


def _check_split(
    function: Callable[[LossBatch, Options], TokenLoss],
    options: Options,
    batch: LossBatch,
    whole: TokenLoss,
    order: Sequence[int],
    name: str,
) -> None:
    for cuts in ([1, 2, 3, 4], [2]):
        metrics: dict[str, list[Metric]] = {}
        for samples in (order[a:b] for a, b in itertools.pairwise([0, *cuts, 5])):
            if not samples:
                continue
            part, at = samples_of(batch, samples)
            got = function(part, options)
            _require_close(
                got.loss, whole.loss[at], 1e-9, f"{name}: the loss of a token depends on what shares its microbatch"
            )
            for key, metric in got.metrics.items():
                metrics.setdefault(key, []).append(metric)
        for key, metric in whole.metrics.items():
            if not math.isclose(_figure(metrics.get(key, [])), _figure([metric]), rel_tol=1e-9, abs_tol=1e-12):
                raise AssertionError(f"{name}: the metric {key} does not add up over microbatches")


def _figure(parts: Sequence[Metric]) -> float:
    if not parts:
        return math.nan
    if parts[0].kind == "maximum":
        return max(float(part.value) for part in parts)
    return sum(float(part.value) for part in parts) / max(sum(float(part.count) for part in parts), 1.0)


def _check_gradient_flow(
    function: Callable[[LossBatch, Options], TokenLoss], options: Options, batch: LossBatch, name: str, dense: bool
) -> None:
    current = batch.current_logprobs.detach().requires_grad_()
    loss = function(replace(batch, current_logprobs=current), options).loss
    (gradient,) = torch.autograd.grad(loss.sum() + 0.0 * current.sum(), [current])
    if bool(gradient[batch.advantages == 0].any()) and not dense:
        raise AssertionError(
            f"{name}: tokens of advantage 0 have a gradient, so samples without advantages must not be left out; pass "
            "dense=True"
        )


def _check_direction(function: Callable[[LossBatch, Options], TokenLoss], options: Options, name: str) -> None:
    batch = random_batch(0)
    current = batch.current_logprobs.detach().requires_grad_()
    same = replace(batch, current_logprobs=current, proximal_logprobs=current.detach(), behavior_logprobs=current.detach())
    (gradient,) = torch.autograd.grad(function(same, options).loss.sum(), [current])
    _require_close(
        gradient, -batch.advantages, 1e-9, f"{name}: on fresh data the gradient is not that of -A log pi, token by token"
    )


def _check_extremes(value: Callable[[LossBatch], Tensor], name: str) -> None:
    """Turns of three tokens, each a sample of its own, with all combinations of extreme log-probs."""
    rows = torch.tensor(list(itertools.product(EXTREMES, EXTREMES, EXTREMES, (-3.0, 0.0, 3.0))), dtype=torch.float32)
    count = len(rows)
    ids = torch.arange(count) // 3
    current, entropy = rows[:, 0].clone().requires_grad_(), torch.zeros(count)
    extreme = LossBatch(
        current_logprobs=current,
        proximal_logprobs=rows[:, 1],
        behavior_logprobs=rows[:, 2],
        advantages=rows[:, 3],
        ages=ids % 5,
        turn=ids,
        sample=ids,
        group=ids,
        role=ids,
        player=ids,
        rewards=rows[:, 3],
        totals=LossTotals(tokens=count, turns=int(ids[-1]) + 1, samples=int(ids[-1]) + 1),
        entropy=entropy,
        reference_logprobs=rows[:, 1],
        values=entropy,
        proximal_values=entropy,
        value_targets=entropy,
    )
    result = value(extreme)
    gradient = torch.autograd.grad(result.sum(), [current], allow_unused=True)[0] if result.requires_grad else None
    sound = result.isfinite() if gradient is None else result.isfinite() & gradient.isfinite()
    if not bool(sound.all()):
        at = int((~sound).nonzero()[0, 0])
        raise AssertionError(
            f"{name}: not finite at the log-probs current, proximal and behavior and the advantage {rows[at].tolist()}: "
            f"loss {float(result[at].detach())}, gradient {None if gradient is None else float(gradient[at])}; "
            "clamp log ratios before exp"
        )


def _require_close(got: Tensor, expected: Tensor, tolerance: float, message: str) -> None:
    if got.shape != expected.shape or not torch.allclose(got.double(), expected.double(), rtol=tolerance, atol=tolerance):
        raise AssertionError(f"{message}: got {got.tolist()}, expected {expected.tolist()}")
