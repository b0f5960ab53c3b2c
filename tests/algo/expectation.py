"""Exact expectations over all episodes and groups of a small environment: the gradient, and what an estimator gives."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
import pytest

from agentrl.algo.advantage import advantages
from agentrl.algo.config import AlgorithmConfig
from agentrl.types import Trajectory
from tests.algo.build import group
from tests.algo.trees import THETA, Array, Outcome


def exact_gradient(outcomes: Sequence[Outcome], objective: Callable[[Outcome], float]) -> Array:
    """Gradient of the expected objective, by central differences of the exact expectation (no score function)."""

    def expected(theta: Array) -> float:
        return sum(outcome.probability(theta) * objective(outcome) for outcome in outcomes)

    gradient = np.zeros_like(THETA)
    for index in np.ndindex(THETA.shape):
        step = np.zeros_like(THETA)
        step[index] = 1e-3
        # Fourth order: the error is about 1e-12.
        gradient[index] = (
            8 * (expected(THETA + step) - expected(THETA - step)) - expected(THETA + 2 * step) + expected(THETA - 2 * step)
        ) / (12 * 1e-3)
    return gradient


Estimator: TypeAlias = Callable[[Sequence[Trajectory]], Sequence[Array]]


def expected_estimate(
    outcomes: Sequence[Outcome], size: int, estimate: Estimator, weight: Callable[[Outcome, int], float] = lambda o, t: 1.0
) -> Array:
    """Expectation over all groups of the mean over episodes of sum over turns of weight * A * score."""
    scores = [outcome.scores(THETA) for outcome in outcomes]
    weights = [np.array([weight(o, t) for t in range(len(o.steps))]) for o in outcomes]
    probabilities = [outcome.probability(THETA) for outcome in outcomes]
    recorded = [outcome.trajectory() for outcome in outcomes]
    assert sum(probabilities) == pytest.approx(1.0, abs=1e-14)
    total = np.zeros_like(THETA)
    for members in itertools.product(range(len(outcomes)), repeat=size):
        chance = float(np.prod([probabilities[i] for i in members]))
        for i, values in zip(members, estimate([recorded[i] for i in members]), strict=True):
            total += chance / size * np.einsum("t,tsa->sa", weights[i] * values, scores[i])
    return total


def by(config: AlgorithmConfig) -> Estimator:
    return lambda episodes: advantages(group(episodes), config).per_turn


def whole_return(outcome: Outcome) -> float:
    return outcome.trajectory().episode_return
