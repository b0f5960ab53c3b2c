"""The guard against stale data: effective samples, and the factor of the learning rate."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from agentrl.algo.config import AlgorithmConfig
from agentrl.algo.guard import learning_rate_factor
from agentrl.algo.loss_batch import LossBatch, LossTotals
from agentrl.algo.loss_metrics import combine, ess_ratio
from agentrl.algo.objective import Objective
from agentrl.errors import ConfigError


def ratio_of(log_weights: Sequence[Sequence[float]]) -> float:
    """Return the metric of samples whose tokens have these log weights current / behavior."""
    values = torch.tensor([value for sample in log_weights for value in sample])
    sample = torch.tensor([number for number, each in enumerate(log_weights) for _ in each])
    zeros = torch.zeros_like(sample)
    batch = LossBatch(
        current_logprobs=values - 400.0,
        proximal_logprobs=values - 400.0,
        behavior_logprobs=torch.full_like(values, -400.0),
        advantages=torch.ones_like(values),
        ages=zeros,
        turn=zeros,
        sample=sample,
        group=zeros,
        role=zeros,
        player=zeros,
        rewards=torch.ones_like(values),
        totals=LossTotals(tokens=len(values), turns=1, samples=len(log_weights)),
    )
    return combine([Objective(AlgorithmConfig())(batch).metrics])["sample_ess_ratio"]


def test_equal_weights_are_all_effective_and_one_that_outweighs_the_others_is_one_sample() -> None:
    assert ratio_of([[0.5], [0.25, 0.25], [0.5, 0.0, 0.0]]) == pytest.approx(1.0)
    assert ratio_of([[290.0], [0.0], [-290.0], [0.0]]) == pytest.approx(0.25)
    assert ess_ratio(0, 0.0, 0.0) == 1.0


def test_the_ratio_is_the_squared_sum_over_the_sum_of_squares_of_whole_samples() -> None:
    assert ratio_of([[math.log(2.0), math.log(0.5)], [math.log(3.0)]]) == pytest.approx(16 / 20, rel=1e-4)


def test_the_factor_is_the_root_of_the_ratio_over_its_base_and_at_most_1() -> None:
    assert [learning_rate_factor(ratio) for ratio in (0.0, 0.25, 1.0)] == [0.0, 0.5, 1.0]
    assert [learning_rate_factor(ratio, base=0.5) for ratio in (0.125, 0.5, 0.9)] == [0.5, 1.0, 1.0]
    for ratio, base in ((1.1, 1.0), (-0.1, 1.0), (0.5, 0.0), (math.nan, 1.0)):
        with pytest.raises(ValueError, match="expected a ratio"):
            learning_rate_factor(ratio, base)


def test_a_guard_may_return_a_whole_number_but_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = "def whole(ratio):\n    return min(1, ratio / 0.5)\n\n\ndef word(ratio):\n    return ratio > 0.5\n"
    (tmp_path / "my_guards.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    assert [Objective(AlgorithmConfig(guard="my_guards:whole")).rate_factor(ratio) for ratio in (0.9, 0.25)] == [1.0, 0.5]
    with pytest.raises(ConfigError, match=r"algorithm\.guard: my_guards:word returned a bool; return a float"):
        Objective(AlgorithmConfig(guard="my_guards:word")).rate_factor(0.9)


def test_the_bundled_guard_starts_below_its_base() -> None:
    def factors(guard: object) -> list[float]:
        objective = Objective(AlgorithmConfig.model_validate({"guard": guard}))
        return [objective.rate_factor(ratio) for ratio in (0.04, 0.16, 0.25, 0.64, 1.0)]

    assert factors({"effective_samples": {"base": 0.25}}) == pytest.approx([0.4, 0.8, 1.0, 1.0, 1.0])
    assert factors("effective_samples") == pytest.approx([0.2, 0.4, 0.5, 0.8, 1.0])
    assert factors("none") == [1.0] * 5


def test_a_guard_with_options_that_do_not_fit_is_refused_by_name() -> None:
    assert AlgorithmConfig(guard={"effective_samples": 0.5}).slots.guard.given == {"base": 0.5}
    for given, message in (
        ({"effective_samples": 2}, r"algorithm\.guard: effective_samples\.base: input should be less than or equal to 1"),
        ({"effective_samples": {"bias": 1}}, r"algorithm\.guard: effective_samples has no option 'bias'; its options: base"),
        ("ess", r"algorithm\.guard: there is no 'ess'; expected none, effective_samples, or module:function"),
    ):
        with pytest.raises((ValueError, ConfigError), match=message):
            AlgorithmConfig(guard=given)
