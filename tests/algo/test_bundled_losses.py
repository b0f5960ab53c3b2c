"""Each bundled loss, term, correction and centre: against its reference, its golden values, and the properties of all."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import cast

import pytest
import torch
from pydantic import BaseModel
from torch import Tensor

from agentrl.algo.config import AlgorithmConfig
from agentrl.algo.corrections import CORRECTIONS, PROXIMALS
from agentrl.algo.loss_batch import LossBatch, TokenLoss, Weights, mean
from agentrl.algo.losses import POLICY_LOSSES, M2poOptions, m2po
from agentrl.algo.slots import Bundled, NoOptions
from agentrl.algo.terms import TERMS
from agentrl_testing import check_correction, check_policy_loss
from agentrl_testing.properties.loss_batches import random_batch, samples_of
from tests.algo import loss_references

VARIANTS: Mapping[str, Sequence[Mapping[str, object]]] = {
    "gspo": ({}, {"segment": "sample"}, {"clip_low": 0.2, "clip_high": 0.2}),
    "anchored": ({}, {"low": 0.05}, {"plateau": True}, {"low_per_version": 0.05}),
    "vespo": ({}, {"segment": "turn"}),
    "m2po": ({}, {"budget": 0.4}, {"budget": 4.0}, {"least_low": 0.01, "least_high": 0.01, "budget": 0.01}),
    "kl": ({}, {"k": 1}, {"k": 3}),
    "sequence_truncate": ({}, {"segment": "sample", "cap": 1.5}),
    "geometric_mask": ({}, {"low": 0.8, "high": 1.3}, {"low": 0.8, "high": 1.3, "segment": "sample"}),
    "m2po_mask": ({}, {"budget": 0.3}),
    "mask": ({}, {"cap": 1.2}),
    "icepop": ({}, {"low": 0.9, "high": 1.2}),
}


def load(bundled: Bundled) -> Callable[..., TokenLoss]:
    """Return a policy loss or a term."""
    return cast("Callable[..., TokenLoss]", bundled.function)


def load_correction(bundled: Bundled) -> Callable[..., Weights]:
    return cast("Callable[..., Weights]", bundled.function)


def cases(table: Mapping[str, Bundled]) -> list[tuple[str, Mapping[str, object]]]:
    return [(name, options) for name in table for options in VARIANTS.get(name, ({},))]


def reference(name: str) -> Callable[[LossBatch, BaseModel], list[float]]:
    return lambda batch, options: loss_references.values_of(getattr(loss_references, name), batch, options)


@pytest.mark.parametrize(("name", "given"), cases(POLICY_LOSSES))
def test_each_policy_loss_has_the_properties_of_one_and_equals_its_reference(name: str, given: Mapping[str, object]) -> None:
    bundled = POLICY_LOSSES[name]
    options = bundled.options.model_validate(given)
    check_policy_loss(load(bundled), options, reference=reference(name), dense=bundled.dense)


@pytest.mark.parametrize(("name", "given"), cases(TERMS))
def test_each_term_has_the_properties_of_one_and_equals_its_reference(name: str, given: Mapping[str, object]) -> None:
    bundled = TERMS[name]
    options = bundled.options.model_validate(given)
    check_policy_loss(load(bundled), options, reference=reference(name), dense=bundled.dense, reinforce=False)


@pytest.mark.parametrize(("name", "given"), cases(CORRECTIONS))
def test_each_correction_has_the_properties_of_one_and_equals_its_reference(name: str, given: Mapping[str, object]) -> None:
    bundled = CORRECTIONS[name]
    options = bundled.options.model_validate(given)
    check_correction(load_correction(bundled), options)
    for seed in range(3):
        batch = random_batch(seed)
        result = load_correction(bundled)(batch, options)
        expected = reference(name)(batch, options)
        assert torch.where(result.keep, result.weight, 0.0).tolist() == pytest.approx(expected, rel=1e-9)


GOLDEN: Mapping[str, Sequence[float]] = {
    "ppo": [-2.4, -2.210342, 0.8],
    "dual_clip": [-2.4, -2.210342, 0.8],
    "gspo": [-2.0008, -2.0008, 0.9997],
    "m2po": [-2.983649, -2.210342, 0.7],
    "cispo": [1.491825, 2.210342, -0.898658],
    "sapo": [-4.96429, -4.210148, 1.368936],
    "dppo_tv": [0.0, 2.0, 0.0],
    "anchored": [-2.4, -2.210342, 0.898658],
    "vespo": [1.165984, 2.331967, -0.815074],
    "topr": [1.0, 2.0, -0.403793],
    "kimi": [1.05, 2.0, -1.872],
    "reinforce": [1.0, 2.0, -2.0],
    "entropy": [-0.5, -1.0, -1.5],
    "kl": [0.125, 0.0, 0.5],
    "log_ratio": [1.0, 0.0, 2.56],
    "value": [0.5, 0.32, 0.125],
    "none": [1.0, 1.0, 1.0],
    "clamp": [1.822119, 0.904837, 0.449329],
    "mask": [1.822119, 0.904837, 0.449329],
    "icepop": [1.822119, 0.904837, 0.0],
    "m2po_mask": [0.0, 1.0, 0.0],
    "sequence_truncate": [1.648721, 1.648721, 0.449329],
    "geometric_mask": [0.0, 0.0, 0.0],
}


def three_tokens() -> LossBatch:
    """Return a turn of two tokens that gained probability and one of a token that lost it."""
    batch, _ = samples_of(random_batch(0), [0])
    tensors = {
        "current_logprobs": torch.tensor([-0.5, -1.0, -2.0], dtype=torch.float64),
        "proximal_logprobs": torch.tensor([-0.9, -1.1, -1.2], dtype=torch.float64),
        "behavior_logprobs": torch.tensor([-1.5, -1.0, -0.4], dtype=torch.float64),
        "advantages": torch.tensor([2.0, 2.0, -1.0], dtype=torch.float64),
        "reference_logprobs": torch.tensor([-1.0, -1.0, -1.0], dtype=torch.float64),
        "entropy": torch.tensor([0.5, 1.0, 1.5], dtype=torch.float64),
        "values": torch.tensor([0.0, 0.5, 0.5], dtype=torch.float64),
        "proximal_values": torch.tensor([0.0, 0.0, 0.5], dtype=torch.float64),
        "value_targets": torch.tensor([1.0, 1.0, 0.0], dtype=torch.float64),
        "ages": torch.tensor([0, 1, 3]),
    }
    ids = {"turn": torch.tensor([0, 0, 1]), "sample": torch.tensor([0, 0, 0])}
    return replace(batch, **{name: value[:3] for name, value in tensors.items()}, **ids)


def test_the_golden_values_stay() -> None:
    batch = three_tokens()
    losses = {name: load(one)(batch, one.options()).loss for name, one in (POLICY_LOSSES | TERMS).items()}
    weights = {name: load_correction(one)(batch, one.options()).weight for name, one in CORRECTIONS.items()}
    got: dict[str, list[float]] = {name: values.tolist() for name, values in (losses | weights).items()}
    assert {name: [round(value, 6) + 0.0 for value in values] for name, values in got.items()} == GOLDEN


def test_the_centre_of_the_trust_region_is_the_forward_pass_the_versions_or_the_policy_that_sampled() -> None:
    batch = three_tokens()
    got: dict[str, list[float]] = {name: cast("Tensor", one.function(batch)).tolist() for name, one in PROXIMALS.items()}
    assert got["forward"] == batch.proximal_logprobs.tolist()
    assert got["behavior"] == batch.behavior_logprobs.tolist()
    # Age 0: the behavior policy; age 1: half of the way to the current one; age 3: three quarters.
    assert got["versions"] == pytest.approx([-1.5, -1.0, -0.4 + 0.75 * -1.6])


@pytest.mark.parametrize("name", ["entropy", "kl", "my_terms:pull"])
def test_the_weight_of_a_term_falls_in_a_line_and_then_stays(name: str) -> None:
    def weights(options: dict[str, float]) -> list[float]:
        fields = {"terms": [{name: options}], "reference": {} if name == "kl" else None}
        [term] = AlgorithmConfig.model_validate(fields).slots.terms
        return [term.weight_at(step) for step in (0, 1, 3, 4, 9)]

    falling = {"weight": 0.4, "final_weight": 0.0, "over_steps": 4}
    assert weights(falling) == pytest.approx([0.4, 0.3, 0.1, 0.0, 0.0])
    assert weights({"weight": 0.4}) == [0.4] * 5


# Negative controls: the checks see what is wrong with these.


def unclamped(batch: LossBatch, options: NoOptions) -> TokenLoss:
    return TokenLoss(loss=-(batch.current_logprobs - batch.proximal_logprobs).exp() * batch.advantages)


def centered_in_the_microbatch(batch: LossBatch, options: NoOptions) -> TokenLoss:
    return TokenLoss(loss=-(batch.advantages - batch.advantages.mean()) * batch.current_logprobs)


def attached_weight(batch: LossBatch, options: NoOptions) -> TokenLoss:
    weight = (batch.current_logprobs - batch.behavior_logprobs).clamp(-20, 20).exp()
    return TokenLoss(loss=-weight * batch.advantages * batch.current_logprobs)


def hidden_penalty(batch: LossBatch, options: NoOptions) -> TokenLoss:
    return TokenLoss(loss=-batch.advantages * batch.current_logprobs + batch.current_logprobs.square())


def mean_of_means(batch: LossBatch, options: NoOptions) -> TokenLoss:
    share = mean(batch.advantages.mean().expand(1))
    return TokenLoss(loss=-batch.advantages * batch.current_logprobs, metrics={"share": share})


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (unclamped, "not finite at the log-probs"),
        (centered_in_the_microbatch, "depends on what shares its microbatch"),
        (attached_weight, "not that of -A log pi"),
        (hidden_penalty, "pass dense=True"),
        (mean_of_means, "metric share does not add up"),
    ],
)
def test_a_loss_with_a_common_mistake_is_refused(
    function: Callable[[LossBatch, NoOptions], TokenLoss], message: str
) -> None:
    with pytest.raises(AssertionError, match=message):
        check_policy_loss(function, NoOptions())


def test_the_published_budget_of_m2po_depends_on_the_packing() -> None:
    with pytest.raises(AssertionError, match="depends on what shares its microbatch"):
        check_policy_loss(m2po, M2poOptions(over="microbatch", least_low=0.01, least_high=0.01))
