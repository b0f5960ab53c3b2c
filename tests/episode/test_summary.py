"""The statistics of a batch of episodes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from agentrl.episode.summary import episode_metrics, is_success, staleness_metrics
from agentrl.types import EpisodeFailure, StopReason
from tests.algo.build import episode, turn


def test_episodes_that_a_limit_ended_are_counted_by_limit() -> None:
    done = episode([turn()], 1.0)
    looping = [replace(done, stop_reason=StopReason.TURN_LIMIT, final_reward=0.0)] * 2
    too_long = replace(done, stop_reason=StopReason.CONTEXT_LIMIT, final_reward=0.0)
    failure = EpisodeFailure(kind="EpisodeLimit", message="m", traceback="")
    failed = replace(done, stop_reason=StopReason.TOKEN_LIMIT, final_reward=None, failure=failure)
    metrics = episode_metrics([done, *looping, too_long, failed])
    assert {key: value for key, value in metrics.items() if key.startswith("limits.")} == {
        "limits.context_limit": 1,
        "limits.turn_limit": 2,
    }


def test_turns_tokens_and_truncation_are_told_apart_by_outcome() -> None:
    short = episode([turn(tokens=2)], 1.0)
    cut = episode([turn(tokens=3), replace(turn(tokens=5), stop_reason=StopReason.LENGTH)], 0.0)
    limited = replace(episode([turn(tokens=4)] * 4, 0.0), stop_reason=StopReason.TURN_LIMIT)
    finished = episode([turn(tokens=6)], 0.0)
    broken = replace(cut, final_reward=None, failure=EpisodeFailure(kind="E", message="m", traceback=""))
    found = episode_metrics([short, cut, limited, finished, broken])
    assert {key: value for key, value in found.items() if "_by_outcome" in key} == {
        "turns_mean_by_outcome.right": 1.0,
        "output_tokens_mean_by_outcome.right": 2.0,
        "truncated_share_by_outcome.right": 0.0,
        "turns_mean_by_outcome.wrong": 7 / 3,
        "output_tokens_mean_by_outcome.wrong": 10.0,
        "truncated_share_by_outcome.wrong": 2 / 3,
    }
    assert "turns_mean_by_outcome.wrong" not in episode_metrics([short])


def test_tokens_that_no_episode_knows_have_no_mean_and_those_of_some_count_as_0_elsewhere() -> None:
    unknown = [episode([turn(tokens=0)], reward) for reward in (1.0, 0.0)]
    assert not {key for key in episode_metrics(unknown) if key.startswith("output_tokens_mean")}
    found = episode_metrics([*unknown, episode([turn(tokens=2)], 1.0)])
    assert (found["output_tokens_mean_by_outcome.right"], found["output_tokens_mean_by_outcome.wrong"]) == (1.0, 0.0)


def test_parts_of_rewards_add_up_to_the_mean_return() -> None:
    first = replace(episode([turn()], 0.75), reward_parts={"right": 1.0, "length!": -0.25})
    second = replace(episode([turn()], 1.0), reward_parts={"right": 1.0})
    found = episode_metrics([first, second])
    assert {key: value for key, value in found.items() if key.startswith("reward_parts.")} == {
        "reward_parts.length_": -0.125,
        "reward_parts.right": 1.0,
    }
    assert found["return_mean"] == 0.875


@pytest.mark.parametrize(
    ("recorded", "final", "expected"),
    [
        (None, 0.1, True),
        (None, 0.0, False),
        (None, -1.0, False),
        (None, None, False),
        (0.5, -1.0, True),
        (0.49, 1.0, False),
        (1.0, None, True),
        (0.0, 1.0, False),
    ],
)
def test_a_recorded_success_decides_and_elsewhere_a_positive_end(
    recorded: float | None, final: float | None, expected: bool
) -> None:
    one = replace(episode([turn()], final), metrics={} if recorded is None else {"success": recorded})
    assert is_success(one) is expected
    assert episode_metrics([one])["success_rate"] == float(expected)
    failed = replace(one, final_reward=None, failure=EpisodeFailure(kind="E", message="m", traceback=""))
    assert not is_success(failed)


def test_percentiles_of_the_staleness_are_ages_of_tokens_and_rounded_up() -> None:
    ages = np.array([0] * 98 + [3, 8], np.int32)
    found = staleness_metrics(ages)
    assert found == {"staleness_mean": 0.11, "staleness_p50": 0, "staleness_p99": 8, "staleness_max": 8}
    assert staleness_metrics(np.array([1, 4], np.int32))["staleness_p50"] == 4
    assert staleness_metrics(ages[:0]) == {}
