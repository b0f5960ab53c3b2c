"""Credit where the policy's actions decide which turn completes first, and when a reward is set: exact, by enumeration."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from agentrl.algo.advantages.turn_returns import returns_to_go
from agentrl.algo.batch_advantages import advantages
from agentrl.types import Trajectory
from agentrl_testing.properties.exact_gradients import (
    exact_by_turn,
    exact_gradient,
    expected_estimate,
    sent_before,
    sharers,
    whole_return,
)
from agentrl_testing.properties.timed_trees import TIMED, Environment, players, racing, racing_branches
from agentrl_testing.properties.trees import STATES, THETA, Array, Outcome
from tests.algo.build import EPISODE, TURN, by, changed, group

TEAMWORK = [each for each in TIMED if each is not players]
"""The environments whose turns all earn one return."""


def depth_factor(discount: float) -> Callable[[Outcome, int], float]:
    """Return the factor of a turn that is settled before it acts: by the turns that were sent up to it."""

    def factor(outcome: Outcome, turn: int) -> float:
        step = outcome.steps[turn]
        return discount ** sent_before(sharers(outcome, step), (step.sent_at or 0) + 0.5)

    return factor


@pytest.mark.parametrize("environment", TIMED)
@pytest.mark.parametrize("discount", [1.0, 0.9, 0.5])
def test_each_turn_gets_a_fixed_multiple_of_the_gradient_of_its_discounted_return(
    environment: Environment, discount: float
) -> None:
    outcomes = list(environment())
    exact = exact_by_turn(outcomes, discount)
    assert np.abs(exact).max() > 0.02 * discount**3
    config = changed(TURN, {"discount": discount})
    estimate = expected_estimate(outcomes, 2, by(config), weight=depth_factor(discount))
    np.testing.assert_allclose(estimate, exact, atol=1e-10)


@pytest.mark.parametrize("environment", TEAMWORK)
def test_without_a_discount_that_is_the_gradient_of_the_whole_return(environment: Environment) -> None:
    outcomes = list(environment())
    exact = exact_gradient(outcomes, whole_return)
    np.testing.assert_allclose(exact_by_turn(outcomes, 1.0), exact, atol=1e-10)
    np.testing.assert_allclose(expected_estimate(outcomes, 2, by(EPISODE)), exact / 2, atol=1e-10)


@pytest.mark.parametrize("environment", [each for each in TIMED if len(list(each())) <= 8])
def test_in_a_group_of_three_that_lost_members_the_gradient_is_that_of_a_whole_one(environment: Environment) -> None:
    outcomes = list(environment())
    short = changed(TURN, {"group_size": 8})
    np.testing.assert_allclose(expected_estimate(outcomes, 3, by(short)), exact_by_turn(outcomes, 1.0), atol=1e-10)


def credit_by_completion(episodes: Sequence[Trajectory]) -> list[Array]:
    """Credit the turns that were complete when the rewarded turn was sent."""
    result: list[Array] = []
    for one in episodes:
        rewards = np.array([turn.reward or 0.0 for turn in one.turns])
        players = [turn.player for turn in one.turns]
        result.append(
            np.array(
                [
                    rewards[at]
                    + (one.final_reward or 0.0)
                    + sum(
                        reward
                        for turn, reward in zip(one.turns, rewards, strict=True)
                        if turn.sent_after > at and turn.player == players[at]
                    )
                    for at in range(len(rewards))
                ]
            )
        )
    return result


@pytest.mark.parametrize("environment", TIMED)
def test_credit_by_completion_is_biased_in_each_of_them(environment: Environment) -> None:
    outcomes = list(environment())
    missed = expected_estimate(outcomes, 1, credit_by_completion) - exact_by_turn(outcomes, 1.0)
    assert np.abs(missed).max() > 0.015


def test_credit_by_completion_trains_the_length_of_an_answer_that_nobody_pays() -> None:
    outcomes = list(racing())
    exact = exact_by_turn(outcomes, 1.0)
    np.testing.assert_allclose(exact[1], 0.0, atol=1e-10)
    assert expected_estimate(outcomes, 1, credit_by_completion)[1, 1] < -0.1
    np.testing.assert_allclose(expected_estimate(outcomes, 2, by(TURN))[1], 0.0, atol=1e-12)


def variance(outcomes: Sequence[Outcome]) -> float:
    """Return E|g - E g|^2 of the turn estimate over all groups of 2."""
    second_moment, mean = 0.0, np.zeros((STATES, THETA.shape[1]))
    for members in itertools.product(outcomes, repeat=2):
        chance = float(np.prod([member.probability(THETA) for member in members]))
        per_turn = advantages(group([member.trajectory() for member in members]), TURN).per_turn
        rows = [np.einsum("t,tsa->sa", a, m.scores(THETA)) for a, m in zip(per_turn, members, strict=True)]
        estimate = np.sum(rows, axis=0)
        second_moment += chance * float(np.square(estimate).sum())
        mean += chance * estimate
    return second_moment - float(np.square(mean).sum())


def test_declared_branches_take_out_the_noise_of_each_other() -> None:
    assert variance(list(racing_branches())) < 0.9 * variance(list(racing()))


def test_a_turn_of_a_branch_gets_nothing_of_another_branch_and_all_of_the_final_reward() -> None:
    for outcome in racing_branches():
        one = outcome.trajectory()
        unpaid = [at for at, turn in enumerate(one.turns) if turn.branch == (1,)]
        assert returns_to_go(one, 0.5)[unpaid].tolist() == [outcome.final]
