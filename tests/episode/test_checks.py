"""Log-probs, version spans, rewards with parts, and what is read off the turns of an episode."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from agentrl.episode.checks import check_reward_parts, check_spans, sound_logprobs
from agentrl.errors import InvariantError
from agentrl.types import Group, Task, Turn, VersionSpan
from tests.algo.build import episode, turn

VALUES = st.one_of(
    st.floats(max_value=0, allow_infinity=False, allow_nan=False, width=32),
    st.sampled_from([0.0, -0.0, 5e-5, 2e-4, 1.0, math.nan, math.inf, -math.inf, -3.4e38]),
)


@given(values=st.lists(VALUES, min_size=1, max_size=80))
@example([-1.0] * 40 + [math.nan])
@example([math.nan, -1.0])
@example([-3.4e38] * 32)
@example([-3.4e38] * 33)
def test_logprobs_are_sound_if_all_are_finite_and_none_is_positive(values: list[float]):
    expected = all(math.isfinite(value) and value <= 1e-4 for value in values)
    assert sound_logprobs(np.array(values, np.float32)) is expected


@pytest.mark.parametrize(
    "spans",
    [
        [(0, 2, 1), (3, 4, 1)],  # a gap
        [(0, 2, 1), (1, 4, 1)],  # an overlap
        [(1, 4, 1)],
        [(0, 0, 1), (0, 4, 1)],
        [(0, 3, 1)],
        [(0, 4, 2), (4, 5, 2)],
        [(0, 2, 2), (2, 4, 1)],
    ],
)
def test_version_spans_cover_each_token_once_and_never_go_back(spans: list[tuple[int, int, int]]) -> None:
    check_spans([VersionSpan(0, 2, 1), VersionSpan(2, 4, 2)], 4, None, "here")
    with pytest.raises(InvariantError, match=r"^here: "):
        check_spans([VersionSpan(*each) for each in spans], 4, None, "here")


def test_a_reward_is_the_sum_of_its_parts_with_their_signs() -> None:
    assert check_reward_parts({"right": 1.0, "long": -0.25}, "run") == (0.75, {"right": 1.0, "long": -0.25})
    assert check_reward_parts(0.5, "run") == (0.5, {})


def test_the_return_of_a_player_is_that_of_its_own_turns_and_the_end() -> None:
    game = episode([turn(1.0, player="a"), turn(4.0, 0, player="b"), turn(16.0, 1, player="a")], 0.5)
    assert game.player_returns() == {"a": 17.5, "b": 4.5}
    assert game.episode_return == 21.5


def test_a_group_is_as_old_as_the_oldest_of_its_tokens() -> None:
    mixed = replace(turn(tokens=3), spans=(VersionSpan(0, 1, 4), VersionSpan(1, 3, 6)))
    young, empty = replace(turn(), spans=(VersionSpan(0, 1, 7),)), turn(tokens=0)

    def oldest(*turns_of_episodes: list[Turn]) -> int:
        episodes = tuple(replace(episode([turn()]), turns=tuple(turns)) for turns in turns_of_episodes)
        return Group(index=0, task=Task(id="t", data={}), episodes=episodes, admitted_version=3).min_version()

    assert oldest([young], [mixed, young]) == 4
    assert oldest([young], [empty]) == 7
    assert oldest([empty]) == 3
