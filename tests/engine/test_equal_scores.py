"""Groups whose members all get one score are warned about once, after many in a row."""

from __future__ import annotations

from dataclasses import replace

import pytest

from agentrl.engine.skipped import WINDOW, EqualScores
from agentrl.types import EpisodeFailure, StopReason, Trajectory
from tests.algo.build import episode, turn

EPISODE = Trajectory(episode_id="e", task_id="t", turns=(), stop_reason=StopReason.COMPLETED, final_reward=1.0)
EQUAL = (EPISODE, EPISODE)
DIFFERENT = (EPISODE, replace(EPISODE, final_reward=0.5))
FAILED = tuple(
    replace(EPISODE, final_reward=None, failure=EpisodeFailure(kind="E", message="", traceback="")) for _ in range(2)
)
GIVEN = tuple(replace(EPISODE, advantage=0.0) for _ in range(2))


def test_a_warning_comes_with_the_last_group_of_the_window_and_never_again(caplog: pytest.LogCaptureFixture) -> None:
    watch = EqualScores()
    for number in range(3 * WINDOW):
        watch.see(EQUAL)
        assert len(caplog.records) == (number + 1 >= WINDOW)
    watch.see(DIFFERENT)
    for _ in range(WINDOW):
        watch.see(EQUAL)
    assert len(caplog.records) == 1


def test_a_group_that_differs_begins_the_count_again(caplog: pytest.LogCaptureFixture) -> None:
    watch = EqualScores()
    for _ in range(WINDOW):
        for group in (*[EQUAL] * (WINDOW - 1), DIFFERENT):
            watch.see(group)
    assert not caplog.records


REWARDED = (episode([turn(0.0)], 1.0), episode([turn(0.5)], 1.0))


@pytest.mark.parametrize("group", [FAILED, GIVEN, EQUAL[:1], REWARDED])
def test_groups_without_scores_to_compare_do_not_count(
    group: tuple[Trajectory, ...], caplog: pytest.LogCaptureFixture
) -> None:
    watch = EqualScores()
    for _ in range(WINDOW):
        watch.see(group)
    assert not caplog.records
