"""Schedules and Muon."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from agentrl.trainer.optimizer import (
    Muon,
    adamw,
    clip_gradients,
    orthogonalize,
    schedule_factor,
    update_to_weight_ratio,
)


@given(schedule=st.sampled_from(["linear", "cosine"]), warmup=st.integers(0, 20), total=st.integers(21, 200))
def test_a_schedule_rises_to_one_and_falls_to_zero(schedule: str, warmup: int, total: int) -> None:
    assert schedule in ("linear", "cosine")
    factors = [schedule_factor(s, schedule=schedule, warmup_steps=warmup, total_steps=total) for s in range(total + 3)]

    assert max(factors) == 1.0 == factors[warmup]
    assert factors[: warmup + 1] == sorted(factors[: warmup + 1])
    assert factors[warmup:] == sorted(factors[warmup:], reverse=True)
    assert factors[0] > 0
    assert factors[total:] == pytest.approx([0, 0, 0])


def test_a_constant_schedule_stays_at_one() -> None:
    assert [schedule_factor(s, schedule="constant", warmup_steps=0, total_steps=2) for s in (0, 1, 99)] == [1, 1, 1]


def test_orthogonalized_matrices_have_singular_values_near_one_and_the_same_singular_vectors() -> None:
    torch.manual_seed(0)
    matrices = torch.randn(3, 16, 24)

    result = orthogonalize(matrices)

    values = torch.linalg.svdvals(result)
    assert float(values.min()) > 0.6
    assert float(values.max()) < 1.3
    for before, after in zip(matrices, result, strict=True):
        left, _, right = torch.linalg.svd(before, full_matrices=False)
        core = left.T @ after @ right.T
        torch.testing.assert_close(core, torch.diag(core.diag()), rtol=0, atol=1e-4)


def test_a_batch_of_matrices_of_one_shape_moves_as_each_alone_would() -> None:
    torch.manual_seed(0)
    shapes = [(8, 12), (12, 8), (8, 12), (6, 6)]
    together = [nn.Parameter(torch.randn(shape)) for shape in shapes]
    alone = [nn.Parameter(matrix.detach().clone()) for matrix in together]
    optimizers = [Muon(together, lr=0.02), *(Muon([matrix], lr=0.02) for matrix in alone)]

    for _ in range(3):
        for a, b in zip(together, alone, strict=True):
            a.grad = torch.randn(a.shape)
            b.grad = a.grad.clone()
        for optimizer in optimizers:
            optimizer.step()

    for a, b in zip(together, alone, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_a_muon_step_is_nesterov_momentum_orthogonalized_and_scaled() -> None:
    torch.manual_seed(0)
    matrix = nn.Parameter(torch.zeros(12, 3))
    gradients = [torch.randn(12, 3) for _ in range(2)]
    optimizer = Muon([matrix], lr=0.1)

    momentum = torch.zeros(12, 3)
    expected = torch.zeros(12, 3)
    for gradient in gradients:
        matrix.grad = gradient
        optimizer.step()
        momentum = 0.95 * momentum + 0.05 * gradient
        update = orthogonalize((0.05 * gradient + 0.95 * momentum).T[None])[0].T
        expected -= 0.1 * 2.0 * update  # sqrt(12 / 3) = 2

    torch.testing.assert_close(matrix.detach(), expected, rtol=1e-4, atol=1e-5)


def test_muon_refuses_what_is_not_a_matrix() -> None:
    with pytest.raises(ValueError, match="matrices only"):
        Muon([nn.Parameter(torch.zeros(3))], lr=0.1)


def test_weight_decay_touches_matrices_only() -> None:
    matrix, vector = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2))
    optimizer = adamw([matrix, vector], lr=0.1, betas=(0.9, 0.95), weight_decay=0.5)
    matrix.grad, vector.grad = torch.zeros(2, 2), torch.zeros(2)

    optimizer.step()

    assert matrix.detach().flatten().tolist() == pytest.approx([0.95] * 4)
    assert vector.tolist() == [1.0, 1.0]


def test_the_norm_of_millions_of_gradients_is_that_of_float64_and_clipping_scales_to_the_bound() -> None:
    parameters = [torch.zeros(shape) for shape in [(4000, 1000), (7,)]]
    for number, parameter in enumerate(parameters):
        parameter.grad = 1e-3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number))
    gradients = [parameter.grad.double() for parameter in parameters if parameter.grad is not None]
    exact = float(sum(gradient.square().sum() for gradient in gradients)) ** 0.5

    assert clip_gradients(parameters, max_norm=exact / 4) == pytest.approx(exact, rel=1e-6)

    for parameter, gradient in zip(parameters, gradients, strict=True):
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad.double(), gradient / 4, rtol=1e-5, atol=1e-12)


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_the_update_to_weight_ratio_is_that_of_the_weights_before_and_after(decay: float) -> None:
    generator = torch.Generator().manual_seed(0)
    weights = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((7, 5), (5,), (3, 2))]
    optimizer = adamw(weights, lr=1e-2, betas=(0.9, 0.95), weight_decay=decay)
    assert update_to_weight_ratio(optimizer) == 0.0
    for _ in range(3):
        for weight in weights:
            weight.grad = torch.randn(weight.shape, generator=generator)
        before = [weight.detach().double().clone() for weight in weights]
        optimizer.step()
        optimizer.zero_grad()
        moved = sum(float((a.detach() - b).square().sum()) for a, b in zip(weights, before, strict=True))
        size = sum(float(weight.detach().double().square().sum()) for weight in weights)
        assert update_to_weight_ratio(optimizer) == pytest.approx((moved / size) ** 0.5, rel=1e-4)


def test_gradients_within_the_bound_stay_as_they_are() -> None:
    parameter = torch.zeros(2)
    parameter.grad = torch.tensor([0.3, 0.4])
    assert clip_gradients([parameter], max_norm=5.0) == pytest.approx(0.5)
    assert parameter.grad.tolist() == pytest.approx([0.3, 0.4])
