"""A few episodes of a step, as text."""

from __future__ import annotations

from dataclasses import replace

import pytest

from agentrl.observe.trackers.sample import choose_episodes, episode_text
from agentrl.types import EpisodeFailure, Trajectory
from tests.algo.build import episode, turn


def numbered(returns: list[float]) -> list[Trajectory]:
    return [replace(episode([turn()], value), episode_id=f"e{index}") for index, value in enumerate(returns)]


@pytest.mark.parametrize(
    ("count", "expected"),
    [(0, []), (1, ["best e2"]), (2, ["best e2", "worst e1"]), (3, ["best e2", "worst e1", "random e0"])],
)
def test_the_best_and_the_worst_come_first(count: int, expected: list[str]) -> None:
    chosen = choose_episodes(numbered([0.5, 0.0, 1.0]), count, seed="training 1")
    assert [f"{one.choice} {one.episode.episode_id}" for one in chosen] == expected


def test_no_episode_is_chosen_twice() -> None:
    for size in range(6):
        chosen = choose_episodes(numbered([0.0] * size), 4, seed="s")
        assert len({one.episode.episode_id for one in chosen}) == len(chosen) == min(size, 4)


def test_a_failed_episode_is_no_sample() -> None:
    done, failed = numbered([1.0, 0.0])
    failed = replace(failed, final_reward=None, failure=EpisodeFailure(kind="K", message="m", traceback=""))
    assert [one.episode for one in choose_episodes([failed, done], 3, seed="s")] == [done]


def test_the_text_shows_each_turn_and_what_the_model_wrote() -> None:
    one = episode([turn(), turn(parent=0)], 1.0)
    text = episode_text(one, lambda ids: f"<{len(ids)}>")
    assert "return 1, success, ended by completed" in text
    assert "--- turn 1 after turn 0" in text
    assert text.count("[[<") == 2


def test_text_of_a_model_cannot_steer_the_page() -> None:
    assert "\x1b" not in episode_text(episode([turn()], 1.0), lambda _: "\x1b[31m")
