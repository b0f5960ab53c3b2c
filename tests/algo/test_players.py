"""Players of one episode have returns of their own: by enumeration, each one's turns get the gradient of its own return."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from agentrl.algo.advantages.turn_returns import returns_to_go
from agentrl.algo.batch_advantages import advantages
from agentrl.algo.config import AlgorithmConfig
from agentrl.types import Trajectory
from tests.algo.build import EPISODE, TURN, episode, group, turn

Array = NDArray[np.float64]
THETA = np.random.default_rng(7).normal(size=4)
"""The log-odds of action 1 in each of four turns; the first player takes turns 0 and 2, the second 1 and 3."""
ACTIONS = list(itertools.product((0, 1), repeat=4))
FINAL = 0.25


def outcome(actions: Sequence[int]) -> float:
    """What the first player wins and the second loses."""
    a, b, c, d = actions
    return 2.0 * a * c - 1.5 * b * d + (a ^ b) - 0.5 * (c & d) + 0.75 * (b ^ c)


def play(actions: Sequence[int], *, named: bool = True) -> Trajectory:
    """Return the episode: each player is paid on its last turn; the second one's was sent last."""
    won = outcome(actions)
    rewards = (None, None, won, -won)
    turns = [turn(reward, sent_after=index) for index, reward in enumerate(rewards)]
    if named:
        turns = [replace(one, player=("first", "second")[index % 2]) for index, one in enumerate(turns)]
    return episode(turns, FINAL)


def chances(theta: Array) -> Array:
    """Return the probability of each entry of `ACTIONS`."""
    ones = 1 / (1 + np.exp(-theta))
    return np.array([[p if a else 1 - p for a, p in zip(actions, ones, strict=True)] for actions in ACTIONS]).prod(axis=1)


def exact() -> Array:
    """Return, for each turn, the gradient of its own player's expected return: +outcome for the first, -outcome else."""
    values = np.array([outcome(actions) for actions in ACTIONS])
    gradient = np.empty(4)
    for index in range(4):
        step = np.zeros(4)
        step[index] = 1e-3
        differences = [chances(THETA + k * step) @ values - chances(THETA - k * step) @ values for k in (1, 2)]
        gradient[index] = (8 * differences[0] - differences[1]) / (12 * 1e-3) * (1 if index % 2 == 0 else -1)
    return gradient


def estimate(config: AlgorithmConfig, size: int, *, named: bool = True) -> Array:
    """Return the expectation, over all groups, of the mean over episodes of A * gradient of the log-probability."""
    probabilities, episodes = chances(THETA), [play(actions, named=named) for actions in ACTIONS]
    scores = np.array(ACTIONS) - 1 / (1 + np.exp(-THETA))
    total = np.zeros(4)
    for members in itertools.product(range(len(ACTIONS)), repeat=size):
        per_turn = advantages(group([episodes[i] for i in members]), config).per_turn
        chance = float(np.prod(probabilities[list(members)]))
        total += chance / size * sum(a * scores[i] for a, i in zip(per_turn, members, strict=True))
    return total


@pytest.mark.parametrize(("config", "scale"), [(TURN, 1.0), (EPISODE, 0.5)])
def test_each_player_s_turns_get_the_gradient_of_its_own_return(config: AlgorithmConfig, scale: float) -> None:
    assert np.abs(exact()).min() > 0.05
    np.testing.assert_allclose(estimate(config, 2), exact() * scale, atol=1e-10)


@pytest.mark.parametrize("config", [TURN, EPISODE])
def test_without_players_a_zero_sum_game_teaches_the_first_moves_nothing(config: AlgorithmConfig) -> None:
    np.testing.assert_allclose(estimate(config, 2, named=False)[:3], 0.0, atol=1e-12)


def test_the_return_to_go_has_the_own_rewards_and_the_shared_final_one() -> None:
    actions = (1, 0, 1, 0)
    won = outcome(actions)
    assert won != 0
    own = [won + FINAL, -won + FINAL, won + FINAL, -won + FINAL]
    assert returns_to_go(play(actions), 1.0).tolist() == own
    assert play(actions).player_returns() == {"first": won + FINAL, "second": -won + FINAL}
    assert play(actions).episode_return == FINAL


def test_a_discount_counts_the_own_turns_only() -> None:
    actions = (1, 0, 1, 0)
    won = outcome(actions)
    expected = [0.5 * won + 0.5 * FINAL, -0.5 * won + 0.5 * FINAL, won + FINAL, -won + FINAL]
    assert returns_to_go(play(actions), 0.5).tolist() == expected


def test_a_player_without_turns_in_another_episode_is_compared_with_the_final_reward_there() -> None:
    alone = episode([replace(turn(3.0), player="first")], 1.0)
    both = episode([replace(turn(3.0), player="first"), replace(turn(2.0, sent_after=1), player="second")], 1.0)
    result = advantages(group([alone, both]), TURN)
    assert [values.tolist() for values in result.per_turn] == [[0.0], [0.0, 2.0]]
    result = advantages(group([alone, both]), EPISODE)
    assert [values.tolist() for values in result.per_turn] == [[0.0], [0.0, 1.0]]


@pytest.mark.parametrize("config", [TURN, EPISODE])
@pytest.mark.parametrize("constant", ["first", "second"])
def test_a_group_has_variance_where_one_player_s_returns_differ_and_another_s_do_not(
    config: AlgorithmConfig, constant: str
) -> None:
    """Whichever player comes last: the one whose returns are all equal must not hide the other."""

    def played(reward: float) -> Trajectory:
        paid = {"first": 1.0, "second": 1.0} | {"second" if constant == "first" else "first": reward}
        return episode([turn(paid[name], sent_after=at, player=name) for at, name in enumerate(("first", "second"))], 0.0)

    result = advantages(group([played(3.0), played(0.0)]), config)
    assert not result.zero_variance
    place = 0 if constant == "first" else 1
    assert [bool(values[place]) for values in result.per_turn] == [False, False]
    assert [bool(values[1 - place]) for values in result.per_turn] == [True, True]


def test_a_group_in_which_each_player_gets_the_same_everywhere_has_no_variance() -> None:
    assert advantages(group([play((1, 0, 1, 0))] * 3), TURN).zero_variance
