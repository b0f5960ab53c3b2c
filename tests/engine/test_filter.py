"""Which groups `keep: mixed` trains: those with an advantage other than 0, under the advantage of the run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from agentrl.algo.config import AlgorithmConfig
from agentrl.engine.filter import load_filter
from agentrl.types import Trajectory
from tests.algo.build import episode, group, linear, turn


def keeps(episodes: Sequence[Trajectory], **fields: object) -> bool:
    config = {"keep": "mixed", "group_size": 2, "groups_per_step": 1, **fields}
    kept = load_filter(AlgorithmConfig.model_validate(config))
    return kept.keeps(group(episodes), version=1)


def game(white: float, black: float) -> Trajectory:
    return episode([turn(white, None, player="white"), turn(black, None, sent_after=1, player="black")])


NEED_MORE = {
    "turn_gae": {"critic": {}},
    "token_gae": {"critic": {}},
    "off_policy_baseline": {},
    "reinforce_plus_plus": {},
}


@pytest.mark.parametrize("name", ["episode", "turn", "grpo", "dr_grpo", "rloo", *NEED_MORE])
def test_a_zero_sum_game_with_one_win_each_is_kept_and_one_with_equal_ends_is_not(name: str) -> None:
    more = {"advantage": name, **NEED_MORE.get(name, {})}
    assert keeps([game(1.0, -1.0), game(-1.0, 1.0)], **more)
    assert not keeps([game(1.0, -1.0), game(1.0, -1.0)], **more)


@pytest.mark.parametrize("name", ["turn", "optimal_baseline", "turn_gae"])
def test_equal_sums_of_different_turn_rewards_are_kept_where_turns_are_credited_one_by_one(name: str) -> None:
    episodes = [linear([1.0, 0.0]), linear([0.0, 1.0])]
    assert keeps(episodes, advantage=name, **NEED_MORE.get(name, {}))
    assert not keeps(episodes, advantage="episode")


def test_an_advantage_of_0_for_all_leaves_a_group_out_although_its_returns_differ() -> None:
    assert not keeps([linear([-1.0]), linear([-2.0])], advantage="max_rl")
    assert keeps([linear([1.0]), linear([0.0])], advantage="max_rl")


def test_given_advantages_count_as_they_are() -> None:
    def given(*values: float) -> list[Trajectory]:
        return [replace(linear([None], 1.0), advantage=value) for value in values]

    assert keeps(given(1.0, 1.0))
    assert not keeps(given(0.0, 0.0))


def test_a_difference_that_no_trained_turn_sees_keeps_nothing() -> None:
    episodes = [linear([1.0]), linear([0.0])]
    greedy = [replace(one, turns=tuple(replace(own, temperature=0.0) for own in one.turns)) for one in episodes]
    assert keeps(episodes)
    assert not keeps(greedy)


def test_the_preset_dapo_keeps_a_game_with_one_win_each() -> None:
    assert keeps([game(1.0, -1.0), game(-1.0, 1.0)], keep={"mixed": {"max_groups_per_step": 4}}, preset="dapo")


def test_after_as_many_groups_as_it_may_leave_out_a_batch_takes_any_and_the_next_one_begins_anew() -> None:
    keep = {"mixed": {"max_groups_per_step": 3}}
    chosen = load_filter(AlgorithmConfig.model_validate({"keep": keep, "group_size": 2, "groups_per_step": 1}))
    equal = group([linear([1.0]), linear([1.0])])
    assert [chosen.keeps(equal, version=version) for version in (1, 1, 1, 1, 2, 2, 2)] == [
        *(False, False, True, True),
        *(False, False, True),
    ]
