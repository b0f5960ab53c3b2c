"""The guard against stale data: effective samples, and the factor of the learning rate."""

from __future__ import annotations

import math

import pytest

from agentrl.algo.guard import learning_rate_factor, sequence_ess_ratio


def test_equal_weights_are_all_effective_and_one_that_outweighs_the_others_is_one_sample() -> None:
    assert sequence_ess_ratio([0.7, 0.7, 0.7]) == pytest.approx(1.0)
    assert sequence_ess_ratio([800.0, 0.0, -800.0, 0.0]) == pytest.approx(0.25)
    assert sequence_ess_ratio([]) == 1.0


def test_the_ratio_is_the_squared_sum_over_the_sum_of_squares() -> None:
    assert sequence_ess_ratio([math.log(1.0), math.log(3.0)]) == pytest.approx(16 / 20)


def test_the_factor_is_the_root_of_the_ratio_over_its_base_and_at_most_1() -> None:
    assert [learning_rate_factor(ratio) for ratio in (0.0, 0.25, 1.0)] == [0.0, 0.5, 1.0]
    assert [learning_rate_factor(ratio, base=0.5) for ratio in (0.125, 0.5, 0.9)] == [0.5, 1.0, 1.0]
    for ratio, base in ((1.1, 1.0), (-0.1, 1.0), (0.5, 0.0), (math.nan, 1.0)):
        with pytest.raises(ValueError, match="expected an ess_ratio"):
            learning_rate_factor(ratio, base)
