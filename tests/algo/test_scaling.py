"""The scale of advantages, and the KL to a reference in rewards."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal

import msgspec
import numpy as np
import pytest

from agentrl.algo.advantages import GroupAdvantages
from agentrl.algo.advantages.turn_returns import returns_to_go
from agentrl.algo.batch_advantages import (
    NO_BATCHES,
    Normalization,
    RunningSquare,
    advantages,
    batch_advantages,
    scaled_advantages,
    spread_over_tokens,
)
from agentrl.algo.config import AlgorithmConfig
from agentrl.algo.group_slots import priced, with_kl_rewards
from agentrl.types import Float32Array, Group, Trajectory
from tests.algo.build import episode, group, linear, turn

EPISODES = [linear([None, None], 1.0), linear([None], 0.0), linear([None] * 3, 0.5)]
SOME, EQUAL = group(EPISODES), group([linear([None], 1.0)] * 3)
CONFIG = AlgorithmConfig()


def tokens_of(one: Trajectory) -> list[int]:
    return [len(turn.output_ids) for turn in one.turns]


def by_token(of: Group, estimate: GroupAdvantages) -> np.ndarray:
    pairs = zip(of.episodes, estimate.per_turn, strict=True)
    return np.concatenate([np.repeat(values, tokens_of(one)) for one, values in pairs])


def twice(estimate: GroupAdvantages) -> GroupAdvantages:
    return replace(estimate, per_turn=tuple(2 * values for values in estimate.per_turn))


@pytest.mark.parametrize(("kind", "ratio"), [("group", 1.0), ("batch", 2.0), ("running", 2.0)])
def test_the_tokens_of_a_group_or_of_a_batch_have_a_mean_square_of_1(kind: Normalization, ratio: float) -> None:
    first, equal = advantages(SOME, CONFIG), advantages(EQUAL, CONFIG)
    groups = [SOME, SOME, EQUAL]
    result, _ = scaled_advantages(groups, [first, twice(first), equal], kind, NO_BATCHES)
    one, other, nothing = (by_token(of, each) for of, each in zip(groups, result, strict=True))
    np.testing.assert_allclose(other, ratio * one)
    assert not nothing.any(), "a group that teaches nothing stays so"
    counted = {
        "group": one,
        "batch": np.concatenate([one, other, nothing]),
        "running": np.concatenate([one, other, nothing]),
    }
    assert np.square(counted[kind]).mean() == pytest.approx(1.0)


@pytest.mark.parametrize("kind", ["group", "batch", "running"])
def test_tokens_of_one_turn_are_scaled_one_by_one(kind: Normalization) -> None:
    of = group([episode([turn(tokens=2), turn(tokens=1)], 1.0), episode([turn(tokens=1)], 0.0)])
    given = ((np.array([1.0, -2.0]), np.array([4.0])), (np.array([0.0]),))
    estimate = replace(advantages(of, CONFIG), per_token=given)
    [result], seen = scaled_advantages([of], [estimate], kind, NO_BATCHES)
    assert result.per_token is not None
    root = math.sqrt((1 + 4 + 16 + 0) / 4)
    assert [[own.tolist() for own in turns] for turns in result.per_token] == [[[1 / root, -2 / root], [4 / root]], [[0.0]]]
    assert seen == (RunningSquare(4.0, 21.0) if kind == "running" else NO_BATCHES)


def test_a_running_scale_forgets_slowly_and_survives_a_record_bit_for_bit() -> None:
    first = advantages(SOME, CONFIG)
    seen, scales = NO_BATCHES, []
    for number in range(5):
        estimate = first if number % 2 else twice(first)
        [result], seen = scaled_advantages([SOME], [estimate], "running", seen)
        scales.append(float(estimate.per_turn[0][0] / result.per_turn[0][0]))
        assert msgspec.json.decode(msgspec.json.encode(seen), type=RunningSquare) == seen
    assert scales[0] > scales[1]
    assert scales[1] < scales[2]
    [alone], after = scaled_advantages([EQUAL], [advantages(EQUAL, CONFIG)], "running", NO_BATCHES)
    assert not any(values.any() for values in alone.per_turn)
    assert after.squares == 0


def test_given_advantages_stay_and_count_nowhere() -> None:
    given = group([replace(one, advantage=value) for one, value in zip(EPISODES, (3.0, -1.0, 0.5), strict=True)])
    [result, other], seen = scaled_advantages(
        [given, SOME], [advantages(given, CONFIG), advantages(SOME, CONFIG)], "running", NO_BATCHES
    )
    assert [float(values[0]) for values in result.per_turn] == [3.0, -1.0, 0.5]
    [alone], expected = scaled_advantages([SOME], [advantages(SOME, CONFIG)], "running", NO_BATCHES)
    assert seen == expected
    np.testing.assert_array_equal(by_token(SOME, other), by_token(SOME, alone))


def reference_of(one: Trajectory, difference: float) -> list[Float32Array]:
    return [(turn.output_logprobs - difference).astype(np.float32) for turn in one.turns]


@pytest.mark.parametrize(("k", "price"), [(1, 0.5), (2, 0.125), (3, np.exp(-0.5) - 0.5)])
def test_a_turn_pays_for_its_own_kl_and_no_later_turn_does(k: Literal[1, 2, 3], price: float) -> None:
    one = linear([None, 0.25, None], 1.0)
    plain = group([one, replace(one, episode_id="other")])
    reference = [[reference_of(each, 0.5) for each in plain.episodes]]
    [paid] = with_kl_rewards([plain], reference, weight=0.1, k=k)
    sizes = np.array(tokens_of(one))
    got = [turn.reward for turn in paid.episodes[0].turns]
    assert got == pytest.approx(np.array([0.0, 0.25, 0.0]) - 0.1 * price * sizes, rel=1e-5)
    # Credited to the turn and to those before it: the return-to-go of the last turn has its own price alone.
    member = replace(one, episode_id="free")
    uneven = group([one, member])
    [mixed] = with_kl_rewards([uneven], [[reference_of(one, 0.5), reference_of(member, 0.0)]], weight=0.1, k=k)
    found = advantages(mixed, AlgorithmConfig(advantage="turn")).per_turn[0]
    assert found == pytest.approx(-0.1 * price * np.cumsum(sizes[::-1])[::-1], rel=1e-4)


def test_greedy_turns_pay_nothing() -> None:
    one = linear([None, None], 1.0)
    greedy = replace(one, turns=tuple(replace(turn, temperature=0.0) for turn in one.turns))
    [paid] = with_kl_rewards([group([greedy])], [[reference_of(greedy, 0.5)]], weight=1.0, k=1)
    assert [turn.reward for turn in paid.episodes[0].turns] == [None, None]


def test_a_price_is_credited_to_no_later_turn_where_the_turn_s_own_reward_is_set_late() -> None:
    """The reward of turn 0 is set at the end; its KL was known when its tokens were sampled."""
    late = episode([turn(0.25, None, sent_at=1, rewarded_at=9), turn(None, 0, sent_at=3)], 1.0)
    free = replace(late, episode_id="free")
    uneven = group([late, free])
    [paid] = with_kl_rewards([uneven], [[reference_of(late, 0.5), reference_of(free, 0.0)]], weight=0.1, k=1)
    first, second = advantages(paid, AlgorithmConfig(advantage="turn")).per_turn[0].tolist()
    assert first == pytest.approx(-0.1, rel=1e-4), "its own price and that of the turn after it"
    assert second == pytest.approx(-0.05, rel=1e-4), "its own price alone"
    assert returns_to_go(paid.episodes[0], 1.0) == pytest.approx([1.25 - 0.1, 1.25 - 0.05])
    assert [own.reward for own in paid.episodes[0].turns] == pytest.approx([0.25 - 0.05, -0.05])


def test_two_prices_of_a_turn_are_both_paid_before_what_was_sent_later() -> None:
    late, after = turn(1.0, None, sent_at=1, rewarded_at=9), turn(None, 0, sent_at=3)
    for reward in (1.0, None):
        own = replace(late, reward=reward, rewarded_at=None if reward is None else 9)
        paid = episode([priced(priced(own, 0.25), 0.5), after], 2.0)
        assert returns_to_go(paid, 1.0).tolist() == [2.0 + (reward or 0.0) - 0.75, 2.0 + (reward or 0.0)]
        assert paid.episode_return == 2.0 + (reward or 0.0) - 0.75


def test_given_advantages_are_not_normalized_with_the_batch() -> None:
    given = group([replace(one, advantage=value) for one, value in zip(EPISODES[:2], (0.5, -0.5), strict=True)])
    config = AlgorithmConfig(advantage="reinforce_plus_plus")
    kept, mine = batch_advantages([given, SOME], config)
    assert [values.tolist() for values in kept.per_turn] == [[0.5, 0.5], [-0.5]]
    assert not kept.zero_variance
    [alone] = batch_advantages([SOME], config)
    np.testing.assert_array_equal(by_token(SOME, mine), by_token(SOME, alone))
    [only] = batch_advantages([given], config)
    assert [values.tolist() for values in only.per_turn] == [[0.5, 0.5], [-0.5]]


def test_the_sums_of_running_fade_with_each_batch() -> None:
    assert RunningSquare(100.0, 50.0).followed_by(1.0, 4.0) == RunningSquare(100.0, 53.5)


def test_tokens_out_of_the_loss_count_nowhere_in_a_scale() -> None:
    one = linear([None, None], 1.0)
    played = group([replace(one, turns=(one.turns[0], replace(one.turns[1], left_out=True))), linear([None], 0.0)])
    given = GroupAdvantages(per_turn=(np.array([2.0, 100.0]), np.array([-2.0])), zero_variance=False)
    [found], _ = scaled_advantages([played], [given], "batch", NO_BATCHES)
    assert [values.tolist() for values in found.per_turn] == [[1.0, 50.0], [-1.0]]


def test_values_of_tokens_stand_at_the_sampled_tokens_after_the_context_of_their_turn() -> None:
    [sample] = episode([turn(None, tokens=2, context=3)], 1.0).branches()
    assert spread_over_tokens(sample, [np.array([5.0, 6.0])]).tolist() == [0.0, 0.0, 0.0, 5.0, 6.0]
