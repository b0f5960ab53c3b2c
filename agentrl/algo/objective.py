"""The loss of a microbatch: what the slots of a run make of its tokens, and its diagnostics.

Invariant: the loss is a sum over tokens divided by numbers of the whole minibatch, so it does not depend on how a minibatch
is packed, ordered or split over microbatches and ranks. No function is named here; a run's slots name them. With u the ratio
of the current to the proximal policy and w that of the proximal to the behavior policy:

    loss = aggregate(weight(w) * policy_loss(u, A)) + sum over terms of their weight * aggregate(term)
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple, cast

import torch
from torch import Tensor

from agentrl.algo.config import AlgorithmConfig, AlgorithmSlots, TermSlot
from agentrl.algo.loss_batch import LossBatch, Metric, TokenLoss, Weights, importance_ratio, mean, sum_by
from agentrl.algo.loss_metrics import LossMetrics, Marks, measure
from agentrl.algo.slots import Loaded, Slot
from agentrl.errors import ConfigError

RESERVED: Final = frozenset({"loss", "weight", "kept"})
"""Metrics that each slot has without its function's doing."""
_NAME = re.compile(r"[a-z0-9_]+")


class LossOutput(NamedTuple):
    """The loss of one microbatch."""

    loss: Tensor
    """Scalar; the parts of all microbatches add up to the loss of the minibatch."""
    proximal: Tensor
    """[T] the log-probs that were the center of the ratio."""
    metrics: LossMetrics


@dataclass(frozen=True, slots=True, kw_only=True)
class _Term:
    slot: TermSlot
    function: Loaded[TokenLoss]


class Objective:
    """The slots of a run, loaded where losses are computed."""

    def __init__(self, algorithm: AlgorithmConfig) -> None:
        """Import the functions and make their options; raises ConfigError, which names slot, function and fix."""
        slots = algorithm.slots
        self.slots: AlgorithmSlots = slots
        self._proximal = slots.proximal.load(Tensor)
        self._policy_loss = slots.policy_loss.load(TokenLoss)
        corrections = [slot for slot in (slots.token, slots.sequence) if slot.name != "none"]
        self._corrections = [slot.load(Weights) for slot in corrections]
        self._guard = None if slots.guard.name == "none" else slots.guard.load(object)
        self._terms = [_Term(slot=term, function=term.slot.load(TokenLoss)) for term in slots.terms]
        loaded = [self._policy_loss, *self._corrections, *(term.function for term in self._terms)]
        self._functions = [self._proximal, *loaded]
        self._of_user = {metric_part(each.slot): each for each in loaded if each.slot.bundled is None}
        self._metrics: list[tuple[str, str]] | None = None
        """Name and kind of the metrics of slots, which all microbatches share."""
        names = [metric_part(each.slot) for each in loaded]
        doubled = next((name for name in names if names.count(name) > 1), None)
        if doubled is not None:
            raise ConfigError(
                f"algorithm: two slots are filled by {doubled}, so their metrics would mix; use one of them once"
            )

    def __call__(
        self, batch: LossBatch, *, step: int = 0, marks: Marks | None = None, proximal: Tensor | None = None
    ) -> LossOutput:
        """Return the loss of `batch` in the step after `step` others; `proximal` overrides what the batch has for it.

        Raises:
            ConfigError: a function raised, or returned what its slot cannot take.
        """
        size = batch.current_logprobs.shape
        faults = [_unusable(batch.current_logprobs, batch.behavior_logprobs, batch.advantages)]
        if proximal is None:
            proximal = self._proximal(batch).detach()
            _check_result(self._proximal, "the log-probs", proximal, size)
        faults.append(_unusable(proximal))
        batch = replace(batch, proximal_logprobs=proximal)
        own: dict[str, Metric] = {}
        policy_loss = self._policy_loss(batch)
        check_token_loss(self._policy_loss, policy_loss, size)
        faults.append(_unusable(policy_loss.loss))
        own |= named_metrics(self._policy_loss, policy_loss.metrics)
        weighted, capped = policy_loss.loss, None
        for correction in self._corrections:
            result = correction(batch)
            check_weights(correction, result, size)
            faults.append(_unusable(result.weight))
            weighted = result.weight.detach().masked_fill(~result.keep, 0.0) * weighted
            limited = ~result.keep if result.capped is None else ~result.keep | result.capped
            capped = limited if capped is None else capped | limited
            own |= named_metrics(correction, result.metrics) | {f"{metric_part(correction.slot)}.kept": mean(result.keep)}
        loss = self._aggregate(weighted, batch)
        for term in self._terms:
            added = term.function(batch)
            check_token_loss(term.function, added, size)
            faults.append(_unusable(added.loss))
            weight = term.slot.weight_at(step)
            loss = loss + weight * self._aggregate(added.loss, batch)
            own |= named_metrics(term.function, added.metrics) | _of_term(term, added.loss, weight)
        self._check_metrics(own)
        faults += [own[name].value.detach().isnan().any().double() for name in self._metrics_of_user()]
        with torch.no_grad():
            moved = batch.current_logprobs - batch.behavior_logprobs
            metrics = measure(
                log_weight=proximal - batch.behavior_logprobs,
                proximal=proximal,
                ratio=importance_ratio(batch.current_logprobs, proximal),
                moved=moved,
                advantages=batch.advantages,
                clipped=policy_loss.clipped,
                capped=capped,
                loss=loss,
                sample_log_weights=_by_sample(moved, batch.sample),
                marks=marks or Marks(),
            )
        return LossOutput(loss, proximal, replace(metrics, own=own, faults=torch.stack(faults)))

    def check(self, faults: Sequence[float]) -> None:
        """Raise ConfigError if a function made NaN or infinity of usable numbers, or a user's one a metric that is NaN.

        `faults` are those of all microbatches.
        """
        if not faults or faults[0]:
            return  # the model or the data is at fault
        of_results, of_metrics = faults[1 : len(self._functions) + 1], faults[len(self._functions) + 1 :]
        for function, count in zip(self._functions, of_results, strict=True):
            if count:
                raise ConfigError(
                    f"{function.where} returned NaN or infinity for finite log-probs and advantages, in {count:g} "
                    "microbatches of a minibatch; the weights are unchanged. Bound its exponents and divisors"
                )
        for name, count in zip(self._metrics_of_user(), of_metrics, strict=True):
            if count:
                part, _, metric = name.partition(".")
                raise ConfigError(
                    f"{self._of_user[part].where} returned the metric {metric} as NaN for finite log-probs and advantages, "
                    f"in {count:g} microbatches of a minibatch; the weights are unchanged. Bound its exponents and divisors"
                )

    @property
    def suspects(self) -> str:
        """The losses and terms of the user, which may give a finite loss a gradient that is not; empty if there are none."""
        losses = [self._policy_loss, *(term.function for term in self._terms)]
        return " and ".join(each.where for each in losses if each.slot.bundled is None)

    def rate_factor(self, ratio: float) -> float:
        """Return the factor of the learning rate at this ratio of effective samples, from 0 to 1.

        Raises:
            ConfigError: the function of the slot raised, or returned something else.
        """
        if self._guard is None:
            return 1.0
        factor = self._guard(ratio)
        if not isinstance(factor, int | float) or isinstance(factor, bool):
            raise ConfigError(f"{self._guard.where} returned a {type(factor).__name__}; return a float from 0 to 1")
        if not 0 <= factor <= 1:
            raise ConfigError(
                f"{self._guard.where} returned {factor} for {ratio:g} effective samples a sample; return a factor of the "
                "learning rate from 0 to 1; the weights are unchanged"
            )
        return factor

    def _metrics_of_user(self) -> list[str]:
        return [name for name, _ in self._metrics or () if name.partition(".")[0] in self._of_user]

    def _check_metrics(self, own: Mapping[str, Metric]) -> None:
        found = [(name, metric.kind) for name, metric in own.items()]
        if self._metrics is None:
            self._metrics = found
        if found != self._metrics:
            changed = sorted({name for name, _ in {*found} ^ {*self._metrics}})
            raise ConfigError(
                f"algorithm: the metric {', '.join(changed)} is there in some microbatches only, so it cannot be added up; "
                "return the same metrics always, with a mask where they cover no token"
            )

    def _aggregate(self, loss: Tensor, batch: LossBatch) -> Tensor:
        totals = batch.totals
        if self.slots.aggregate == "token":
            return loss.sum() / totals.tokens
        if self.slots.aggregate == "fixed":
            return loss.sum() / (totals.samples * self.slots.fixed_length)
        ids, count = (batch.turn, totals.turns) if self.slots.aggregate == "turn" else (batch.sample, totals.samples)
        return (loss / sum_by(torch.ones_like(loss), ids)).sum() / count


def metric_part(slot: Slot) -> str:
    """Return a slot's function as a part of a metric's name.

    Example:
        >>> metric_part(Slot(field="algorithm.policy_loss", name="my.losses:MyLoss", given={}, bundled=None))
        'myloss'
    """
    return slot.name.rpartition(":")[2].lower()


def _unusable(*tensors: Tensor) -> Tensor:
    """Return, as a float64 scalar, 1 if a value is NaN or infinite, else 0; nothing waits for the device."""
    found = [~torch.isfinite(each.detach()).all() for each in tensors]
    return torch.stack(found).any().double()


def _by_sample(log_weights: Tensor, sample: Tensor) -> Tensor:
    """Return [T] float64 sums over each sample, at the place of its number; minus infinity where there is none."""
    values = log_weights.detach().double()
    sums = values.new_zeros(len(values)).index_add(0, sample, values)
    tokens = values.new_zeros(len(values)).index_add(0, sample, torch.ones_like(values))
    return sums.masked_fill(tokens == 0, -torch.inf)


def _of_term(term: _Term, loss: Tensor, weight: float) -> dict[str, Metric]:
    part = metric_part(term.slot.slot)
    return {f"{part}.loss": mean(loss), f"{part}.weight": mean(torch.full_like(loss, weight))}


def check_token_loss(function: Loaded[TokenLoss], result: TokenLoss, size: torch.Size) -> None:
    """Raise ConfigError unless the loss and the clipped tokens have one value for each of the `size` tokens."""
    _check_result(function, "loss", result.loss, size)
    if result.clipped is not None:
        _check_result(function, "clipped", result.clipped, size, boolean=True)


def check_weights(function: Loaded[Weights], result: Weights, size: torch.Size) -> None:
    """Raise ConfigError unless weights and masks have one value for each of the `size` tokens."""
    _check_result(function, "weight", result.weight, size)
    _check_result(function, "keep", result.keep, size, boolean=True)
    if result.capped is not None:
        _check_result(function, "capped", result.capped, size, boolean=True)


def _check_result(function: Loaded[object], what: str, given: object, size: torch.Size, *, boolean: bool = False) -> None:
    if not isinstance(given, Tensor):
        raise ConfigError(f"{function.where} returned {what} as a {type(given).__name__}; return a tensor of [T]")
    if given.shape != size:
        raise ConfigError(
            f"{function.where} returned {what} of shape {[*given.shape]}; return one value for each token of the loss, "
            f"{[*size]}: masked tokens are not in the batch, and none can be added"
        )
    if boolean != (given.dtype == torch.bool):
        kind = "bool" if boolean else "float"
        raise ConfigError(f"{function.where} returned {what} of {given.dtype}; return {kind}")


def named_metrics(function: Loaded[object], metrics: Mapping[str, Metric]) -> dict[str, Metric]:
    """Return a function's metrics under the names of its slot; ConfigError: a name is taken, or a value is no metric."""
    named: dict[str, Metric] = {}
    for name, metric in metrics.items():
        if name in RESERVED or not _NAME.fullmatch(name):
            raise ConfigError(
                f"{function.where} returned a metric named {name!r}; use lower-case letters, digits and underscores, "
                f"and not {', '.join(sorted(RESERVED))}, which every slot has"
            )
        if not isinstance(cast("object", metric), Metric):
            raise ConfigError(
                f"{function.where} returned the metric {name} as a {type(metric).__name__}; use mean or maximum"
            )
        named[f"{metric_part(function.slot)}.{name}"] = metric
    return named
