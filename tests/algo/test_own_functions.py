"""Functions of the user in the checks of `agentrl_testing`: with and without options, wrong ones, and those of the pages."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from agentrl.algo.loss_batch import LossBatch, TokenLoss, Weights, mean
from agentrl.config.base import Config
from agentrl.types import Group
from agentrl_testing import check_advantage, check_correction, check_policy_loss
from tests.algo.build import group, linear

HOW_TO = Path(__file__).parents[2] / "docs" / "howto"


def blocks_of(page: str) -> str:
    return "\n".join(re.findall(r"```python\n(.*?)```", (HOW_TO / page).read_text(), re.S))


def names_of(page: str) -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": f"own_functions_of_{Path(page).stem}"}
    exec(compile(blocks_of(page), page, "exec", dont_inherit=True), names)
    return names


def test_the_page_s_own_loss_and_advantage_pass_the_checks_that_the_page_names() -> None:
    names = names_of("algorithm.md")
    check_policy_loss(names["my_gspo"])
    check_policy_loss(names["my_gspo"], names["GspoOptions"](clip_high=5e-4))
    check_advantage(names["best_of_group"], bias="direction")
    assert 'check_advantage(best_of_group, bias="direction")' in (HOW_TO / "algorithm.md").read_text()


def test_the_page_s_own_advantage_teaches_nothing_where_all_fail_or_all_succeed() -> None:
    best_of_group = names_of("algorithm.md")["best_of_group"]
    for value in (0.0, 1.0):
        assert not any(own.any() for own in best_of_group(group([linear([value]) for _ in range(3)])))
    half = best_of_group(group([linear([1.0]), linear([0.0])]))
    assert [own.tolist() for own in half] == [[0.5], [-0.5]]


def test_the_checks_of_the_page_on_losses_run_as_they_stand() -> None:
    assert names_of("losses.md")["report"].factors[2] == pytest.approx(1.0)


class Scale(Config):
    by: float = 1.0


def plain(batch: LossBatch) -> TokenLoss:
    return TokenLoss(loss=-batch.advantages * batch.current_logprobs)


def scaled(batch: LossBatch, options: Scale) -> TokenLoss:
    return TokenLoss(loss=-options.by * batch.advantages * batch.current_logprobs)


def keep_all(batch: LossBatch) -> Weights:
    return Weights(weight=torch.ones_like(batch.advantages), keep=torch.ones_like(batch.turn, dtype=torch.bool))


def minus_others(group: Group) -> list[np.ndarray[Any, Any]]:
    total, others = sum(one.episode_return for one in group.episodes), len(group.episodes) - 1
    return [np.full(len(one.turns), one.episode_return - (total - one.episode_return) / others) for one in group.episodes]


def plain_reference(batch: LossBatch) -> Sequence[float]:
    return (-batch.advantages * batch.current_logprobs).tolist()


def test_a_function_without_options_takes_the_batch_or_the_group_alone() -> None:
    check_policy_loss(plain, reference=plain_reference)
    check_policy_loss(plain, Scale())
    check_correction(keep_all)
    with pytest.raises(AssertionError, match="environment players"):
        check_advantage(minus_others, bias="none")


def test_options_that_are_not_given_are_the_defaults_of_the_function_s_model() -> None:
    check_policy_loss(scaled)
    with pytest.raises(AssertionError, match="not that of -A log pi"):
        check_policy_loss(scaled, Scale(by=2.0))


def without_annotation(batch: LossBatch, options) -> TokenLoss:  # type: ignore[no-untyped-def]
    return plain(batch)


def narrow_clipped(batch: LossBatch) -> TokenLoss:
    return TokenLoss(loss=plain(batch).loss, clipped=torch.zeros(3, dtype=torch.bool))


def float_clipped(batch: LossBatch) -> TokenLoss:
    return TokenLoss(loss=plain(batch).loss, clipped=torch.zeros(len(batch.turn)))


def reserved_metric(batch: LossBatch) -> TokenLoss:
    return TokenLoss(loss=plain(batch).loss, metrics={"loss": mean(batch.advantages)})


def nan_metric(batch: LossBatch) -> TokenLoss:
    return TokenLoss(loss=plain(batch).loss, metrics={"x": mean(batch.advantages * float("nan"))})


def some_metrics(batch: LossBatch) -> TokenLoss:
    return TokenLoss(loss=plain(batch).loss, metrics={"x": mean(batch.advantages)} if len(batch.turn) > 10 else {})


def detached(batch: LossBatch) -> TokenLoss:
    return TokenLoss(loss=-batch.advantages * batch.current_logprobs.detach())


def of_entropy_alone(batch: LossBatch) -> TokenLoss:
    assert batch.entropy is not None
    return TokenLoss(loss=-batch.advantages * batch.entropy)


def nan_gradient(batch: LossBatch) -> TokenLoss:
    distance = batch.current_logprobs - batch.proximal_logprobs
    return TokenLoss(loss=plain(batch).loss + 0.0 * (distance * distance).sqrt())


def scalar(batch: LossBatch) -> Any:  # noqa: ANN401 - no loss
    return plain(batch).loss.sum()


def raising(batch: LossBatch) -> TokenLoss:
    raise KeyError("x")


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (without_annotation, "annotate the parameter 'options' of without_annotation"),
        (narrow_clipped, r"narrow_clipped returned clipped of shape \[3\]; return one value for each token"),
        (float_clipped, r"float_clipped returned clipped of torch\.float32; return bool"),
        (reserved_metric, "reserved_metric returned a metric named 'loss'"),
        (nan_metric, "nan_metric: the metric x is NaN"),
        (some_metrics, "some_metrics: the metric x is there in some microbatches only"),
        (detached, "detached: the loss has no gradient; compute it from batch.current_logprobs"),
        (of_entropy_alone, "of_entropy_alone: on fresh data the gradient is not that of -A log pi"),
        (nan_gradient, "nan_gradient: the gradient is nan where current and proximal log-probs are equal"),
        (scalar, "scalar returned a Tensor; return a TokenLoss"),
        (raising, "raising raised KeyError: 'x'; fix the function"),
    ],
)
def test_a_loss_that_would_end_a_run_fails_the_check(function: Callable[..., TokenLoss], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        check_policy_loss(function)


def wide_cap(batch: LossBatch) -> Weights:
    kept = keep_all(batch)
    return Weights(weight=kept.weight, keep=kept.keep, capped=torch.zeros(len(batch.turn) + 1, dtype=torch.bool))


def kept_metric(batch: LossBatch) -> Weights:
    kept = keep_all(batch)
    return Weights(weight=kept.weight, keep=kept.keep, metrics={"kept": mean(kept.keep)})


def test_a_correction_that_would_end_a_run_fails_the_check() -> None:
    with pytest.raises(AssertionError, match="wide_cap returned capped of shape"):
        check_correction(wide_cap)
    with pytest.raises(AssertionError, match="kept_metric returned a metric named 'kept'"):
        check_correction(kept_metric)


def one_short(group: Group) -> list[np.ndarray[Any, Any]]:
    return minus_others(group)[1:]


def test_an_advantage_that_would_end_a_run_fails_the_check() -> None:
    with pytest.raises(AssertionError, match="one_short returned arrays of the shapes"):
        check_advantage(one_short)
