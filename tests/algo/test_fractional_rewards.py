"""A final reward of any size reaches each advantage whole, whatever turn rewards there are and whatever their type."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from agentrl.algo.advantages.gae import GaeOptions, ValueEstimate, token_gae, turn_gae
from agentrl.algo.advantages.turn_returns import returns_to_go
from agentrl.algo.batch_advantages import batch_advantages
from agentrl.algo.config import AlgorithmConfig
from tests.algo.build import episode, group, linear, turn

WHOLE = GaeOptions(discount=1.0, trace=1.0)


@pytest.mark.parametrize("estimate", [turn_gae, token_gae])
@pytest.mark.parametrize("final", [0.9, 1.7, -0.5, 1, 0.1])
def test_without_turn_rewards_a_critic_credits_the_fraction_of_the_final_reward(
    estimate: Callable[..., Sequence[ValueEstimate]], final: float
) -> None:
    one = linear([None, None], final)
    values = [np.array([0.25], np.float32), np.array([0.5], np.float32)]
    [found] = estimate(group([one]), WHOLE, [values])
    assert [own.tolist() for own in found.targets] == [[pytest.approx(final)]] * 2
    assert [own.tolist() for own in found.advantages] == [[pytest.approx(final - 0.25)], [pytest.approx(final - 0.5)]]


def test_turn_rewards_that_were_set_before_leave_the_fraction_of_the_final_reward_to_later_turns() -> None:
    one = episode([turn(2, rewarded_at=2, sent_at=1), turn(None, 0, sent_at=3)], 0.7)
    [found] = turn_gae(group([one]), WHOLE, [[np.zeros(1, np.float32)] * 2])
    assert [own.tolist() for own in found.advantages] == [[pytest.approx(2.7)], [pytest.approx(0.7)]]


@pytest.mark.parametrize("name", ["turn", "episode", "rloo", "dr_grpo", "optimal_baseline"])
def test_whole_numbers_as_turn_rewards_do_not_round_the_final_one(name: str) -> None:
    played = group([linear([1, 0], 0.7), linear([0, 0], 0.2)])
    [found] = batch_advantages([played], AlgorithmConfig(advantage=name, group_size=2))
    first, second = found.per_turn
    scale = 0.5 if name in ("episode", "dr_grpo") else 1.0
    assert float(first[0]) == pytest.approx(1.5 * scale)
    assert float(second[0]) == pytest.approx(-1.5 * scale)
    assert returns_to_go(played.episodes[0], 1.0).tolist() == [pytest.approx(1.7), pytest.approx(0.7)]
