"""Checks of a policy loss, a term or a correction: packing, extreme ratios, gradients, masks.

Invariant: a check compares a function with itself on the same tokens, with its reference, or with the policy gradient.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

import torch
from pydantic import BaseModel
from torch import Tensor

from agentrl.algo.loss_batch import LossBatch, LossTotals, Metric, TokenLoss, Weights
from agentrl.algo.objective import check_token_loss, check_weights, named_metrics
from agentrl.algo.slots import Loaded, as_loaded
from agentrl_testing.properties.loss_batches import random_batch, samples_of
from agentrl_testing.properties.refusals import refused_as_failure

Options = TypeVar("Options", bound=BaseModel)
Result = TypeVar("Result", TokenLoss, Weights)
SEEDS = range(2)
EXTREMES = (0.0, -1e-6, -1.0, -50.0, -1e4)
"""Log-probs whose differences are taken in all combinations."""


@refused_as_failure()
def check_policy_loss(
    function: Callable[[LossBatch], TokenLoss] | Callable[[LossBatch, Options], TokenLoss],
    options: Options | None = None,
    *,
    reference: Callable[[LossBatch], Sequence[float]] | Callable[[LossBatch, Options], Sequence[float]] | None = None,
    dense: bool = False,
    reinforce: bool = True,
) -> None:
    """Fail where the loss of a token depends on the packing, is not finite, or trains the wrong tokens.

    `options` are the second argument, if there is one; None: the defaults of the model that annotates it. `reference`
    computes the losses in plain floats, slowly. `dense` says that tokens of advantage 0 have a gradient. With `reinforce`,
    the gradient must be that of -A log pi where all three policies agree; a term is no such loss.

    Raises:
        AssertionError: says which property, on which tokens.
    """
    loaded = as_loaded("check_policy_loss", function, options, TokenLoss)
    name = loaded.slot.name
    loss_of = _with_checks(loaded, check_token_loss)
    for seed in SEEDS:
        batch = random_batch(seed)
        whole = _finite_losses(loss_of(batch), batch, name)
        for order in ([0, 1, 2, 3, 4], [4, 2, 0, 3, 1]):
            _check_split(loss_of, batch, whole, order, name)
        if reference is not None:
            slow = as_loaded("check_policy_loss: reference", reference, loaded.options, Sequence)
            expected = torch.tensor(slow(batch), dtype=torch.float64)
            _require_close(whole.loss.detach(), expected, 1e-9, f"{name}: the loss is not that of the reference")
            narrow = loss_of(random_batch(seed, dtype=torch.float32)).loss.detach().double()
            _require_close(narrow, expected, 1e-3, f"{name}: in float32 the loss is another")
        _check_gradient_flow(loss_of, batch, name, dense)
    if reinforce:
        _check_direction(loss_of, name)
    _check_extremes(lambda batch: loss_of(batch).loss, name)


@refused_as_failure()
def check_correction(
    function: Callable[[LossBatch], Weights] | Callable[[LossBatch, Options], Weights], options: Options | None = None
) -> None:
    """Fail where a weight depends on the packing, has a gradient or is not finite, or where fresh data are not left alone.

    `options` are the second argument, if there is one; None: the defaults of the model that annotates it.

    Raises:
        AssertionError: says which property, on which tokens.
    """
    loaded = as_loaded("check_correction", function, options, Weights)
    name = loaded.slot.name
    weights_of = _with_checks(loaded, check_weights)
    for seed in SEEDS:
        batch = random_batch(seed)
        whole = _sound_weights(weights_of(batch), name)
        for order in ([[0], [1], [2], [3], [4]], [[4, 2], [0, 3, 1]]):
            for samples in order:
                part, at = samples_of(batch, samples)
                got = weights_of(part)
                _require_close(got.weight, whole.weight[at], 1e-9, f"{name}: the weight depends on the packing")
                if not torch.equal(got.keep, whole.keep[at]):
                    raise AssertionError(f"{name}: the mask depends on the packing: {got.keep} and {whole.keep[at]}")
        fresh = replace(batch, proximal_logprobs=batch.behavior_logprobs)
        left = weights_of(fresh)
        if not bool(left.keep.all()):
            raise AssertionError(f"{name}: it drops tokens of the policy that is trained; expected all of them kept")
        _require_close(left.weight, torch.ones_like(left.weight), 1e-9, f"{name}: fresh tokens have another weight than 1")
    _check_extremes(lambda batch: weights_of(batch).weight, name)


def _with_checks(
    loaded: Loaded[Result], check: Callable[[Loaded[Result], Result, torch.Size], None]
) -> Callable[[LossBatch], Result]:
    """Return the function with the checks that a run makes of its results."""

    def call(batch: LossBatch) -> Result:
        result = loaded(batch)
        check(loaded, result, batch.advantages.shape)
        named_metrics(loaded, result.metrics)
        return result

    return call


def _finite_losses(result: TokenLoss, batch: LossBatch, name: str) -> TokenLoss:
    if not bool(result.loss.isfinite().all()):
        raise AssertionError(
            f"{name}: expected a finite loss for each of {len(batch.advantages)} tokens, got {result.loss.tolist()}"
        )
    _require_metrics(result.metrics, name)
    return result


def _sound_weights(result: Weights, name: str) -> Weights:
    if result.weight.requires_grad or not bool((result.weight.isfinite() & (result.weight >= 0)).all()):
        raise AssertionError(f"{name}: expected finite weights of at least 0 without a gradient, got {result.weight}")
    _require_metrics(result.metrics, name)
    return result


def _require_metrics(metrics: Mapping[str, Metric], name: str) -> None:
    for key, metric in metrics.items():
        if math.isnan(float(metric.value)):
            raise AssertionError(f"{name}: the metric {key} is NaN for finite log-probs; bound its exponents and divisors")


def _check_split(
    loss_of: Callable[[LossBatch], TokenLoss], batch: LossBatch, whole: TokenLoss, order: Sequence[int], name: str
) -> None:
    for cuts in ([1, 2, 3, 4], [2]):
        metrics: dict[str, list[Metric]] = {}
        for samples in (order[a:b] for a, b in itertools.pairwise([0, *cuts, 5])):
            if not samples:
                continue
            part, at = samples_of(batch, samples)
            got = loss_of(part)
            _require_close(
                got.loss, whole.loss[at], 1e-9, f"{name}: the loss of a token depends on what shares its microbatch"
            )
            for key in got.metrics.keys() ^ whole.metrics.keys():
                raise AssertionError(
                    f"{name}: the metric {key} is there in some microbatches only, so it cannot be added up; return the "
                    "same metrics always, with a mask where they cover no token"
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


def _check_gradient_flow(loss_of: Callable[[LossBatch], TokenLoss], batch: LossBatch, name: str, dense: bool) -> None:
    current = batch.current_logprobs.detach().requires_grad_()
    gradient = _gradient(loss_of(replace(batch, current_logprobs=current)).loss, current, name)
    if bool(gradient[batch.advantages == 0].any()) and not dense:
        raise AssertionError(
            f"{name}: tokens of advantage 0 have a gradient, so samples without advantages must not be left out; pass "
            "dense=True"
        )


def _check_direction(loss_of: Callable[[LossBatch], TokenLoss], name: str) -> None:
    batch = random_batch(0)
    current = batch.current_logprobs.detach().requires_grad_()
    same = replace(batch, current_logprobs=current, proximal_logprobs=current.detach(), behavior_logprobs=current.detach())
    gradient = _gradient(loss_of(same).loss, current, name)
    if not bool(gradient.isfinite().all()):
        raise AssertionError(
            f"{name}: the gradient is {float(gradient[~gradient.isfinite()][0])} where current and proximal log-probs are "
            "equal, as in the first minibatch of a step; look for a root or a division at 0"
        )
    _require_close(
        gradient, -batch.advantages, 1e-9, f"{name}: on fresh data the gradient is not that of -A log pi, token by token"
    )


def _gradient(loss: Tensor, current: Tensor, name: str) -> Tensor:
    if not loss.requires_grad:
        raise AssertionError(
            f"{name}: the loss has no gradient; compute it from batch.current_logprobs, without detach, item or no_grad"
        )
    try:
        return torch.autograd.grad(loss.sum(), [current], materialize_grads=True)[0]
    except RuntimeError as error:
        raise AssertionError(f"{name}: torch cannot compute the gradient of the loss: {error}") from error


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
            "clamp log ratios before exp, and keep roots and divisors above 0"
        )


def _require_close(got: Tensor, expected: Tensor, tolerance: float, message: str) -> None:
    if got.shape != expected.shape or not torch.allclose(got.double(), expected.double(), rtol=tolerance, atol=tolerance):
        raise AssertionError(f"{message}: got {got.tolist()}, expected {expected.tolist()}")
