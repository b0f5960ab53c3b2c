"""Generalized advantage estimation against the recurrence, one token at a time, in plain Python floats."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agentrl.algo.gae import gae


def slow_gae(
    rewards: Sequence[float], values: Sequence[float], boundaries: Sequence[int], discount: float, lam: float
) -> list[float]:
    result = [0.0] * len(rewards)
    for start, end in itertools.pairwise(boundaries):
        following, advantage = 0.0, 0.0
        for t in range(end - 1, start - 1, -1):
            advantage = rewards[t] + discount * following - values[t] + discount * lam * advantage
            following = values[t]
            result[t] = advantage
    return result


def case(lengths: Sequence[int], seed: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    total = sum(lengths)
    rewards = torch.randn(total, generator=generator, dtype=torch.float64).to(dtype)
    values = torch.randn(total, generator=generator, dtype=torch.float64).to(dtype)
    return rewards, values, torch.tensor(np.concatenate([[0], np.cumsum(lengths)]), dtype=torch.int64)


numbers = st.sampled_from([0.0, 0.5, 0.95, 0.99, 1.0])


@given(st.lists(st.integers(0, 200), max_size=12), numbers, numbers, st.integers(0, 1000))
def test_it_equals_the_recurrence(lengths: list[int], discount: float, lam: float, seed: int) -> None:
    rewards, values, boundaries = case(lengths, seed, torch.float64)
    result = gae(rewards, values, boundaries, discount, lam)
    slow = torch.tensor(slow_gae(rewards.tolist(), values.tolist(), boundaries.tolist(), discount, lam), dtype=torch.float64)
    torch.testing.assert_close(result.advantages, slow, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(result.returns, slow + values, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("lengths", [[147_000], [4097] * 36, [7] * 3000, [1] * 500, [1, 5000, 1, 64, 65, 63, 4096]])
@pytest.mark.parametrize("decay", [(1.0, 1.0), (0.99, 0.95)])
def test_float32_is_exact_to_one_in_a_million(lengths: list[int], decay: tuple[float, float]) -> None:
    rewards, values, boundaries = case(lengths, 0, torch.float32)
    result = gae(rewards, values, boundaries, *decay)
    slow = torch.tensor(slow_gae(rewards.tolist(), values.tolist(), boundaries.tolist(), *decay), dtype=torch.float64)
    assert result.advantages.dtype == torch.float32
    assert float(((result.advantages - slow).abs() / slow.abs().clamp(min=1.0)).max()) < 1e-6


def test_with_lambda_one_it_is_the_return_to_go_minus_the_value() -> None:
    result = gae(torch.tensor([1.0, 2.0, 4.0]), torch.tensor([0.5, 0.5, 0.5]), torch.tensor([0, 3]), 1.0, 1.0)
    assert result.advantages.tolist() == [6.5, 5.5, 3.5]
    assert result.returns.tolist() == [7.0, 6.0, 4.0]


def test_with_lambda_zero_it_is_the_one_step_difference() -> None:
    result = gae(torch.tensor([1.0, 2.0]), torch.tensor([3.0, 5.0]), torch.tensor([0, 2]), 0.5, 0.0)
    assert result.advantages.tolist() == [1.0 + 2.5 - 3.0, 2.0 - 5.0]


def test_nothing_crosses_a_boundary_even_when_it_is_not_a_number() -> None:
    rewards, values, boundaries = case([70, 3, 130], 1, torch.float64)
    alone = gae(rewards[:70], values[:70], torch.tensor([0, 70]), 0.99, 0.95)
    rewards[70:73] = float("nan")
    together = gae(rewards, values, boundaries, 0.99, 0.95)
    torch.testing.assert_close(together.advantages[:70], alone.advantages)
    assert together.advantages[70:73].isnan().all()
    assert together.advantages[73:].isfinite().all()


def test_no_gradient_flows_through_it() -> None:
    values = torch.zeros(3, requires_grad=True)
    assert not gae(torch.ones(3), values, torch.tensor([0, 3]), 1.0, 1.0).advantages.requires_grad


def test_inconsistent_arguments_are_refused() -> None:
    ones = torch.ones(3)
    with pytest.raises(ValueError, match="one shape"):
        gae(ones, torch.ones(4), torch.tensor([0, 3]), 1.0, 1.0)
    for boundaries in ([0, 2], [1, 3], [0, 2, 1, 3], [0, 4], []):
        with pytest.raises(ValueError, match="boundaries"):
            gae(ones, ones, torch.tensor(boundaries, dtype=torch.int64), 1.0, 1.0)
    for discount, lam in ((1.1, 1.0), (1.0, -0.1), (float("nan"), 1.0)):
        with pytest.raises(ValueError, match="discount and lam"):
            gae(ones, ones, torch.tensor([0, 3]), discount, lam)
