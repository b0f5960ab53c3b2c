"""The expected policy-gradient estimate, by enumerating every episode and every group, against the exact gradient.

The policy is tabular: softmax(theta[state]) at each state. A tree of turns is played out by an environment that is
stochastic, pays turn rewards and a final reward, and lets the policy decide where an episode stops. All possible
episodes are enumerated with their probabilities; so are all groups of 2 and 3. Expectations are then finite sums, and
"unbiased" means equal to 1e-12, not equal up to noise. `test_credit.py` has the trees whose order the policy decides.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest

from agentrl.algo.advantages.turn_returns import returns_to_go
from agentrl.algo.batch_advantages import advantages
from agentrl.algo.config import AlgorithmConfig
from agentrl.types import Trajectory
from agentrl_testing.properties.exact_gradients import Estimator, exact_gradient, expected_estimate, whole_return
from agentrl_testing.properties.trees import CAUSES, ENVIRONMENTS, THETA, Array, Outcome, chain, stopping
from tests.algo.build import EPISODE, TURN, by, changed, group


@pytest.mark.parametrize("environment", ENVIRONMENTS)
@pytest.mark.parametrize("size", [2, 3])
def test_the_turn_estimate_is_exactly_the_policy_gradient(environment: Callable[[], Iterator[Outcome]], size: int) -> None:
    outcomes = list(environment())
    exact = exact_gradient(outcomes, whole_return)
    assert np.abs(exact).max() > 0.05
    np.testing.assert_allclose(expected_estimate(outcomes, size, by(TURN)), exact, atol=1e-10)


@pytest.mark.parametrize("environment", ENVIRONMENTS)
@pytest.mark.parametrize("size", [2, 3])
def test_the_episode_estimate_is_the_policy_gradient_times_n_minus_one_over_n(
    environment: Callable[[], Iterator[Outcome]], size: int
) -> None:
    outcomes = list(environment())
    exact = exact_gradient(outcomes, whole_return)
    np.testing.assert_allclose(expected_estimate(outcomes, size, by(EPISODE)), exact * (size - 1) / size, atol=1e-10)


@pytest.mark.parametrize("environment", ENVIRONMENTS)
@pytest.mark.parametrize("size", [2, 3])
def test_a_group_that_lost_members_has_the_expected_gradient_of_a_whole_one(
    environment: Callable[[], Iterator[Outcome]], size: int
) -> None:
    outcomes = list(environment())
    exact = exact_gradient(outcomes, whole_return)
    for config, scale in ((EPISODE, 7 / 8), (TURN, 1.0)):
        short = by(changed(config, {"group_size": 8}))
        np.testing.assert_allclose(expected_estimate(outcomes, size, short), exact * scale, atol=1e-10)


def test_the_turn_estimate_varies_less_than_the_episode_estimate_where_each_turn_earns_its_own_reward() -> None:
    """The reason it exists: E|g - E g|^2 over all groups of 2, both scaled to be unbiased."""
    outcomes = list(chain())

    def variance(config: AlgorithmConfig, scale: float) -> float:
        second_moment, mean = 0.0, np.zeros_like(THETA)
        for members in itertools.product(outcomes, repeat=2):
            chance = float(np.prod([m.probability(THETA) for m in members]))
            per_turn = advantages(group([m.trajectory() for m in members]), config).per_turn
            rows = [np.einsum("t,tsa->sa", a, m.scores(THETA)) for a, m in zip(per_turn, members, strict=True)]
            estimate = np.sum(rows, axis=0) * scale
            second_moment += chance * float(np.square(estimate).sum())
            mean += chance * estimate
        return second_moment - float(np.square(mean).sum())

    assert variance(TURN, 1.0) < variance(EPISODE, 2.0)


@pytest.mark.parametrize("discount", [0.9, 0.5])
def test_the_discounted_turn_estimate_weighted_by_depth_is_the_gradient_of_the_discounted_return(discount: float) -> None:
    outcomes = list(stopping())
    config = changed(TURN, {"discount": discount})

    def discounted(outcome: Outcome) -> float:
        turns = sum(discount**t * (step.reward or 0.0) for t, step in enumerate(outcome.steps))
        return turns + discount ** (len(outcome.steps) - 1) * outcome.final

    estimate = expected_estimate(outcomes, 2, by(config), weight=lambda _, t: discount**t)
    np.testing.assert_allclose(estimate, exact_gradient(outcomes, discounted), atol=1e-10)


@pytest.mark.parametrize("environment", ENVIRONMENTS)
@pytest.mark.parametrize("discount", [0.9, 0.5])
def test_the_baseline_adds_no_bias_to_the_discounted_estimate(
    environment: Callable[[], Iterator[Outcome]], discount: float
) -> None:
    outcomes = list(environment())
    config = changed(TURN, {"discount": discount})
    without = expected_estimate(outcomes, 1, lambda episodes: [returns_to_go(e, discount) for e in episodes])
    np.testing.assert_allclose(expected_estimate(outcomes, 2, by(config)), without, atol=1e-12)


def credit_by_ancestry(episodes: Sequence[Trajectory]) -> list[Array]:
    """Returns along `Turn.parent`: the ancestry of tokens instead of the order of causes."""
    result: list[Array] = []
    for one in episodes:
        to_go = np.array([turn.reward or 0.0 for turn in one.turns])
        for index in range(len(to_go) - 1, -1, -1):
            parent = one.turns[index].parent
            if parent is not None:
                to_go[parent] += to_go[index]
        result.append(to_go)
    return result


@pytest.mark.parametrize("environment", CAUSES)
def test_credit_by_the_ancestry_of_tokens_misses_the_gradient(environment: Callable[[], Iterator[Outcome]]) -> None:
    outcomes = list(environment())
    missed = expected_estimate(outcomes, 1, credit_by_ancestry) - exact_gradient(outcomes, whole_return)
    assert np.abs(missed).max() > 0.05


# Negative controls: baselines that look reasonable. The enumeration must be able to see what is wrong with them.


def mean_of_those_that_reach_the_turn(episodes: Sequence[Trajectory]) -> list[Array]:
    """A per-turn-index mean over the group, the own episode included: who stops late is compared with fewer."""
    to_go = [returns_to_go(e, 1.0) for e in episodes]
    return [
        np.array([value - np.mean([other[t] for other in to_go if len(other) > t]) for t, value in enumerate(own)])
        for own in to_go
    ]


def others_that_stopped_at_the_same_turn(episodes: Sequence[Trajectory]) -> list[Array]:
    """Leave-one-out, but over others as long as the own episode (all others when there is none)."""
    to_go = [returns_to_go(e, 1.0) for e in episodes]
    result: list[Array] = []
    for i, own in enumerate(to_go):
        others = [other for j, other in enumerate(to_go) if j != i]
        alike = [other for other in others if len(other) == len(own)] or others
        result.append(np.array([g - np.mean([o[min(t, len(o) - 1)] for o in alike]) for t, g in enumerate(own)]))
    return result


@pytest.mark.parametrize("estimate", [mean_of_those_that_reach_the_turn, others_that_stopped_at_the_same_turn])
def test_a_baseline_that_depends_on_the_own_stopping_turn_is_biased(estimate: Estimator) -> None:
    outcomes = list(stopping())
    exact = exact_gradient(outcomes, whole_return)
    biased = expected_estimate(outcomes, 3, estimate)
    scale = float((biased * exact).sum() / np.square(exact).sum())
    assert np.abs(biased - exact).max() > 0.005
    assert np.abs(biased / scale - exact).max() > 0.005, "biased in direction, not only in length"
