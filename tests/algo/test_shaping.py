"""Overlong punishment and the masking of what was cut off: what is paid, what is trained, and that nothing else changes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from agentrl.algo.advantages.episodes import dr_grpo
from agentrl.algo.advantages.turn_returns import returns_to_go
from agentrl.algo.config import AlgorithmConfig
from agentrl.algo.group_slots import (
    OverlongOptions,
    TruncatedOptions,
    mask_truncated,
    punishment,
    shaped_groups,
    soft_overlong,
)
from agentrl.algo.slots import NoOptions, as_loaded
from agentrl.engine.batch import VerifiedGroups, prepare_batch
from agentrl.errors import ConfigError
from agentrl.types import Group, StopReason, Trajectory
from tests.algo.build import episode, group, turn


def lengths(*counts: int, final: float = 1.0, player: str = "") -> Trajectory:
    return episode([turn(None, at - 1 if at else None, tokens=n, player=player) for at, n in enumerate(counts)], final)


def test_the_punishment_of_the_paper_grows_between_16384_and_20480_tokens() -> None:
    options = OverlongOptions(limit=20480)
    found = [punishment(length, replace_cache(options)) for length in (16384, 17408, 18432, 20480, 30000)]
    assert found == [0.0, 0.25, 0.5, 1.0, 1.0]
    assert punishment(16384, options) == 0.0, "a fifth of the limit is the cache of the paper"
    assert punishment(18432, options) == 0.5


def replace_cache(options: OverlongOptions) -> OverlongOptions:
    return options.model_copy(update={"cache": 4096})


def test_an_episode_pays_where_its_tokens_go_beyond_and_no_later_turn_is_credited_with_it() -> None:
    one = lengths(5, 4, 3)  # 5, 9 and 12 tokens: 0, 0.5 and 1.0 of the punishment
    [shaped] = shaped_groups([group([one])], as_loaded("f", soft_overlong, OverlongOptions(limit=10, cache=2), Group))
    [paid] = shaped.episodes
    assert paid.episode_return == 0.0
    assert returns_to_go(paid, 1.0).tolist() == [0.0, 0.0, 0.5]
    assert [own.reward for own in paid.turns] == [None, -0.5, -0.5]


def test_of_turns_that_run_side_by_side_the_one_that_was_sent_later_goes_beyond() -> None:
    late, early = turn(tokens=5, sent_at=3), turn(tokens=5, sent_at=1)
    paid = soft_overlong(group([episode([late, early], 1.0)]), OverlongOptions(limit=10, cache=4)).episodes[0]
    assert [own.reward for own in paid.turns] == [-1.0, None]


def test_each_turn_may_have_its_own_length_and_each_player_its_own() -> None:
    options = OverlongOptions(limit=4, cache=2, weight=0.3, over="turn")
    paid = soft_overlong(group([lengths(3, 9, 2)]), options).episodes[0]
    assert [own.reward for own in paid.turns] == pytest.approx([-0.15, -0.3, None])
    both = episode([turn(tokens=3, player="a"), turn(sent_after=1, tokens=3, player="b")], 1.0)
    whole = soft_overlong(group([both]), OverlongOptions(limit=4, cache=2)).episodes[0]
    assert [own.reward for own in whole.turns] == [-0.5, -0.5]


def test_tokens_that_are_not_trained_have_no_length() -> None:
    one = lengths(9, 9)
    greedy = replace(one, turns=(replace(one.turns[0], temperature=0.0), replace(one.turns[1], left_out=True)))
    assert soft_overlong(group([greedy]), OverlongOptions(limit=4)).episodes[0].episode_return == 1.0


def cut(one: Trajectory, at: int | None = None, stop: StopReason = StopReason.COMPLETED) -> Trajectory:
    turns = tuple(
        replace(own, stop_reason=StopReason.LENGTH) if number == at else own for number, own in enumerate(one.turns)
    )
    return replace(one, turns=turns, stop_reason=stop)


@pytest.mark.parametrize(
    ("one", "of_episode", "of_turn"),
    [
        (lengths(2, 2), [False, False], [False, False]),
        (cut(lengths(2, 2), 0), [True, True], [True, False]),
        (cut(lengths(2, 2), 1), [True, True], [False, True]),
        *((cut(lengths(2, 2), None, stop), [True, True], [False, False]) for stop in (
            StopReason.TURN_LIMIT, StopReason.TOKEN_LIMIT, StopReason.CONTEXT_LIMIT, StopReason.DEADLINE,
        )),
    ],
)  # fmt: skip
def test_what_was_cut_off_leaves_the_loss_and_keeps_its_return(
    one: Trajectory, of_episode: list[bool], of_turn: list[bool]
) -> None:
    for over, expected in (("episode", of_episode), ("turn", of_turn)):
        masked = mask_truncated(group([one, lengths(2, final=0.0)]), TruncatedOptions.model_validate({"over": over}))
        assert [own.left_out for own in masked.episodes[0].turns] == expected
        first, second = dr_grpo(masked, NoOptions())
        assert first.tolist() == [0.5, 0.5]
        assert second.tolist() == [-0.5]


def test_a_batch_trains_no_token_of_an_episode_that_was_cut_short_and_counts_them() -> None:
    played = group([cut(lengths(2, 2), 1), lengths(3, final=0.0)])
    verified = VerifiedGroups(groups=[played], branches=[[one.branches() for one in played.episodes]])
    plain = AlgorithmConfig(group_size=2, groups_per_step=1, max_staleness=0)
    before = prepare_batch(verified, version=0, algorithm=plain)
    masked = prepare_batch(verified, version=0, algorithm=AlgorithmConfig(
        group_size=2, groups_per_step=1, max_staleness=0, shaping="mask_truncated"))  # fmt: skip
    assert before.metrics["loss_tokens"] == 7
    assert masked.metrics["loss_tokens"] == 3
    assert masked.metrics["masked_tokens"] == masked.shaped_out_tokens == 4
    assert masked.masked_tokens == 0, "no token is over age"
    [left] = masked.batch.samples
    [whole] = before.batch.samples[1:]
    np.testing.assert_array_equal(left.advantages, whole.advantages)


def test_a_batch_pays_for_overlong_answers_and_its_figures_show_the_workflow_s_rewards() -> None:
    played = group([lengths(8), lengths(2)])
    verified = VerifiedGroups(groups=[played], branches=[[one.branches() for one in played.episodes]])
    algorithm = AlgorithmConfig(group_size=2, groups_per_step=1, max_staleness=0, shaping={"soft_overlong": {"limit": 4}})
    prepared = prepare_batch(verified, version=0, algorithm=algorithm)
    assert prepared.advantages == ((-0.5,), (0.5,))
    assert [item.episode_return for item in prepared.batch.samples] == [1.0, 1.0]


def drop_a_turn(played: Group) -> Group:
    return replace(played, episodes=tuple(replace(one, turns=one.turns[:1]) for one in played.episodes))


def other_tokens(played: Group) -> Group:
    def of(one: Trajectory) -> Trajectory:
        return replace(one, turns=tuple(replace(own, output_ids=own.output_ids + 1) for own in one.turns))

    return replace(played, episodes=tuple(map(of, played.episodes)))


def halve(played: Group) -> Group:
    return replace(
        played, episodes=tuple(replace(one, final_reward=(one.final_reward or 0.0) / 2) for one in played.episodes)
    )


def test_a_function_of_the_user_changes_rewards_and_may_change_nothing_that_was_sampled() -> None:
    played = group([lengths(2, 2)])
    [half] = shaped_groups([played], as_loaded("algorithm.shaping", halve, None, Group))
    assert half.episodes[0].final_reward == 0.5
    for wrong in (drop_a_turn, other_tokens):
        with pytest.raises(ConfigError, match="changed what was sampled in group 3"):
            shaped_groups([played], as_loaded("algorithm.shaping", wrong, None, Group))


def test_a_limit_must_be_given() -> None:
    with pytest.raises(ValueError, match=r"algorithm\.shaping: soft_overlong.limit: field required"):
        AlgorithmConfig(shaping="soft_overlong").slots  # noqa: B018


def test_the_tokens_of_one_player_are_no_part_of_the_length_of_another() -> None:
    both = episode([turn(tokens=3, player="a"), turn(sent_after=1, tokens=1, player="b")], 1.0)
    paid = soft_overlong(group([both]), OverlongOptions(limit=4, cache=2)).episodes[0]
    assert [own.reward for own in paid.turns] == [-0.5, None]
