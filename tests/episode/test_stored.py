"""A stored trajectory has what was recorded, and a record of an older version has the order of its turns."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from agentrl.algo.advantages.turn_returns import returns_to_go
from agentrl.algo.batch_advantages import advantages
from agentrl.episode.checks import check_reward_time
from agentrl.episode.codec import encode_line, stored_trajectory, trajectory_record
from agentrl.episode.summary import EndedEpisode
from agentrl.types import EpisodeFailure, Trajectory
from tests.algo.build import EPISODE, episode, group, turn


def record_of(trajectory: Trajectory) -> dict[str, Any]:
    ended = EndedEpisode(trajectory, purpose="training", group=0, step=1, policy_version=1, run_begin_s=0.0)
    return msgspec.json.decode(encode_line(trajectory_record(ended)))


def older(record: dict[str, Any]) -> bytes:
    """Return the line that a version without branches, times of events and given advantages has written."""
    del record["advantage"]
    for each in record["turns"]:
        for name in ("branch", "sent_at", "rewarded_at"):
            del each[name]
    return msgspec.json.encode(record)


def test_a_stored_trajectory_has_its_branches_times_and_advantage() -> None:
    turns = [turn(sent_at=0), turn(0.5, 0, sent_at=1, rewarded_at=4, branch=(0, 2)), turn(0, 0, sent_at=2, rewarded_at=3)]
    stored = stored_trajectory(msgspec.json.encode(record_of(replace(episode(turns, 1.0), advantage=-0.25))))
    assert [(each.branch, each.sent_at, each.rewarded_at) for each in stored.turns] == [
        ((), 0, None),
        ((0, 2), 1, 4),
        ((), 2, 3),
    ]
    assert stored.advantage == -0.25
    [values, _] = advantages(group([stored, stored]), EPISODE).per_turn
    assert values.tolist() == [-0.25] * 3


@st.composite
def unstamped(draw: st.DrawFn) -> Trajectory:
    count = draw(st.integers(1, 6))
    rewards = draw(st.lists(st.none() | st.integers(-9, 9).map(float), min_size=count, max_size=count))
    return episode([turn(each, sent_after=draw(st.integers(0, at))) for at, each in enumerate(rewards)], 2.0)


@given(unstamped())
def test_an_older_record_credits_a_turn_with_all_turns_that_completed_after_it_was_sent(trajectory: Trajectory) -> None:
    stored = stored_trajectory(older(record_of(trajectory)))
    assert stored.advantage is None
    for at, each in enumerate(stored.turns):
        assert each.branch == ()
        check_reward_time(each, f"turn {at}")
    expected = [2.0 + sum(each.reward or 0.0 for each in trajectory.turns[own.sent_after :]) for own in trajectory.turns]
    np.testing.assert_allclose(returns_to_go(stored, 1.0), expected)


def test_a_failure_comes_back_whole_and_one_of_an_older_record_has_no_line() -> None:
    failure = EpisodeFailure(kind="WorkflowError", message="no JSON", traceback="T", after_turn="agent.py:12")
    record = record_of(replace(episode([turn()]), final_reward=None, failure=failure))
    assert stored_trajectory(msgspec.json.encode(record)).failure == failure
    del record["failure"]["after_turn"]
    assert stored_trajectory(msgspec.json.encode(record)).failure == replace(failure, after_turn=None)


def test_an_older_linear_record_keeps_its_discount() -> None:
    linear = episode([turn(1.0), turn(2.0, 0), turn(4.0, 1)], 8.0)
    stored = stored_trajectory(older(record_of(linear)))
    assert returns_to_go(stored, 0.5).tolist() == [1 + 1 + 1 + 2, 2 + 2 + 4, 4 + 8]
