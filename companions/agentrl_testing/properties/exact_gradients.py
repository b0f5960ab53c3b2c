"""Exact expectations over all episodes and groups of a small environment: the gradient, and what an estimator gives."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np

from agentrl.episode.trajectory import are_independent
from agentrl.types import Trajectory
from agentrl_testing.properties.trees import THETA, Array, Outcome, Step


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
    """Return the expectation over all groups of the mean over episodes of the sum over turns of weight * A * score.

    `estimate` must not depend on the order of the episodes: each set of them is played in one order only.
    """
    scores = [outcome.scores(THETA) for outcome in outcomes]
    weights = [np.array([weight(o, t) for t in range(len(o.steps))]) for o in outcomes]
    probabilities = [outcome.probability(THETA) for outcome in outcomes]
    recorded = [outcome.trajectory() for outcome in outcomes]
    if abs(sum(probabilities) - 1.0) > 1e-12:
        raise AssertionError(f"the chances of the outcomes add up to {sum(probabilities)}, not to 1")
    total = np.zeros_like(THETA)
    for members in itertools.combinations_with_replacement(range(len(outcomes)), size):
        orders = math.factorial(size) / math.prod(math.factorial(members.count(i)) for i in set(members))
        chance = orders * float(np.prod([probabilities[i] for i in members]))
        for i, values in zip(members, estimate([recorded[i] for i in members]), strict=True):
            total += chance / size * np.einsum("t,tsa->sa", weights[i] * values, scores[i])
    return total


def whole_return(outcome: Outcome) -> float:
    """Return the sum of all rewards of `outcome`."""
    return outcome.trajectory().episode_return


def sharers(outcome: Outcome, step: Step) -> list[Step]:
    """Return the turns of the same player whose branches are not independent of that of `step`, itself included."""
    return [s for s in outcome.steps if s.player == step.player and not are_independent(s.branch, step.branch)]


def sent_before(turns: Sequence[Step], moment: float) -> int:
    """Return how many of `turns` were sent before `moment`."""
    return sum((step.sent_at or 0) < moment for step in turns)


def discounted_return(like: Step, discount: float) -> Callable[[Outcome], float]:
    """Return what a turn like `like` maximises: each reward, discounted by the turns that were sent before it was set."""

    def total(outcome: Outcome) -> float:
        turns = sharers(outcome, like)
        paid = [step for step in turns if step.reward is not None]
        rewards = sum(discount ** sent_before(turns, step.rewarded_at or 0) * (step.reward or 0.0) for step in paid)
        return rewards + discount ** len(turns) * outcome.final

    return total


def exact_by_turn(outcomes: Sequence[Outcome], discount: float) -> Array:
    """Return, for each state, the gradient of what the turn in that state maximises, [STATES, ACTIONS]."""
    example = {step.state: step for outcome in outcomes for step in outcome.steps}
    alike = {(step.player, step.branch): step for step in example.values()}
    gradients = {key: exact_gradient(outcomes, discounted_return(step, discount)) for key, step in alike.items()}
    result = np.zeros_like(THETA)
    for state, step in example.items():
        result[state] = gradients[step.player, step.branch][state]
    return result
