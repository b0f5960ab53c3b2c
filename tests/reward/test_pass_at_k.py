"""Advantages for the best of k: against all choices of the others, and against the exact gradient by enumeration."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.errors import ConfigError
from agentrl_rewards.pass_at_k import pass_at_k

scores = st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0, -3.0]), min_size=2, max_size=7)


@given(scores, st.data())
def test_the_marginal_is_the_mean_over_all_choices_of_the_others(values: list[float], data: st.DataObject) -> None:
    k = data.draw(st.integers(2, len(values)))
    expected = [
        float(
            np.mean(
                [
                    max(values[at], *others) - max(others)
                    for others in itertools.combinations(values[:at] + values[at + 1 :], k - 1)
                ]
            )
        )
        for at in range(len(values))
    ]
    np.testing.assert_allclose(pass_at_k(values, k).values, expected, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize(("size", "k"), [(2, 2), (3, 2), (3, 3), (4, 3)])
def test_the_expected_estimate_is_the_gradient_of_the_best_of_k_divided_by_k(size: int, k: int) -> None:
    worth = np.array([0.0, 0.3, 1.0])
    theta = np.array([0.2, -0.4, 0.1])

    def chances(at: np.ndarray) -> np.ndarray:
        return np.exp(at) / np.exp(at).sum()

    def best(at: np.ndarray) -> float:
        return sum(
            float(np.prod(chances(at)[list(answers)])) * max(worth[list(answers)])
            for answers in itertools.product(range(3), repeat=k)
        )

    exact = np.array([(best(theta + step) - best(theta - step)) / 2e-5 for step in np.eye(3) * 1e-5])
    estimate = np.zeros(3)
    for answers in itertools.product(range(3), repeat=size):
        chance = float(np.prod(chances(theta)[list(answers)]))
        values = pass_at_k(worth[list(answers)].tolist(), k).values
        for answer, value in zip(answers, values, strict=True):
            estimate += chance / size * value * (np.eye(3)[answer] - chances(theta))
    np.testing.assert_allclose(estimate * k, exact, atol=1e-8)


@pytest.mark.parametrize(
    ("values", "k"), [([1.0], None), ([1.0, 0.0], 1), ([1.0, 0.0], 3), ([], None), ([float("nan"), 0.0], 2)]
)
def test_scores_and_numbers_that_make_no_sense_are_refused(values: list[float], k: int | None) -> None:
    with pytest.raises(ConfigError, match="expected at least 2 finite scores and k from 2 to their number"):
        pass_at_k(values, k)
