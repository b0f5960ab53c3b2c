"""What a person reads when a step trains nothing."""

from __future__ import annotations

import logging
from dataclasses import replace

import numpy as np
import pytest

from agentrl.algo.config import AlgorithmConfig
from agentrl.engine.config import EngineConfig
from agentrl.engine.skipped import SkippedSteps, explain_skip
from agentrl.types import Group, StopReason, Task, Trajectory, Turn, VersionSpan

EPISODE = AlgorithmConfig(advantage="episode")


def episode(rewards: list[float | None], final: float) -> Trajectory:
    ids = np.array([1], np.int32)
    turns = [
        Turn(
            context_ids=ids,
            output_ids=ids,
            output_logprobs=-ids.astype(np.float32),
            spans=(VersionSpan(start=0, end=1, version=1),),
            stop_reason=StopReason.STOP,
            reward=reward,
            sent_after=number,
            sent_at=2 * number,
            rewarded_at=None if reward is None else 2 * number + 1,
        )
        for number, reward in enumerate(rewards)
    ]
    return Trajectory(episode_id="e", task_id="t", turns=tuple(turns), stop_reason=StopReason.COMPLETED, final_reward=final)


def group(*episodes: Trajectory) -> Group:
    return Group(index=0, task=Task(id="t", data={}), episodes=episodes, admitted_version=1)


@pytest.mark.parametrize(
    ("episodes", "algorithm", "expected"),
    [
        ([([1.0, -1.0], 0.0), ([-1.0, 1.0], 0.0)], EPISODE, "turn rewards sum to 0 within each episode: try algorithm.adv"),
        ([([None], 0.0), ([None], 0.0)], EPISODE, "every return is 0: look at an episode"),
        ([([None], 1.0), ([None], 1.0)], EPISODE, "every return is 1: the tasks are solved"),
    ],
)
def test_equal_returns_have_their_cause_and_what_to_change(
    episodes: list[tuple[list[float | None], float]], algorithm: AlgorithmConfig, expected: str
) -> None:
    text = explain_skip("zero_variance", [group(*(episode(*one) for one in episodes))], algorithm)
    assert text.startswith("1 of 1 groups have equal returns")
    assert expected in text


def test_given_advantages_of_zero_have_their_cause() -> None:
    zeros = [replace(episode([0.5], 1.0), advantage=0.0) for _ in range(2)]
    assert "score_group gave each of their members the advantage 0" in explain_skip(
        "zero_variance", [group(*zeros)], EPISODE
    )


def test_returns_that_differ_are_not_called_equal() -> None:
    different = group(episode([None], 1.0), episode([None], 0.0))
    text = explain_skip("zero_variance", [different, different], AlgorithmConfig(advantage="max_rl"))
    assert text.startswith("the advantages of 2 of 2 groups are all 0, although the episodes of 2 differ in their return")
    assert "algorithm.advantage: max_rl" in text


def test_rewards_of_turns_are_no_reason_to_warn_where_advantages_are_given(caplog: pytest.LogCaptureFixture) -> None:
    SkippedSteps(EPISODE, EngineConfig()).step(1, [group(replace(episode([0.5], 0.0), advantage=1.0))], None)
    assert not caplog.records


def test_groups_that_differ_from_each_other_alone_are_named() -> None:
    groups = [group(episode([None], 1.0), episode([None], 1.0)), group(episode([None], 0.0), episode([None], 0.0))]
    assert "tasks differ, but the episodes of one task do not" in explain_skip("zero_variance", groups, EPISODE)


def test_rewards_of_turns_under_the_episode_estimator_are_warned_about_once(caplog: pytest.LogCaptureFixture) -> None:
    watch = SkippedSteps(EPISODE, EngineConfig())
    with caplog.at_level(logging.WARNING):
        for number in (1, 2):
            watch.step(number, [group(episode([0.5], 0.0), episode([None], 1.0))], None)
    [record] = caplog.records
    assert "algorithm.advantage: turn credits it with the rewards that were set after it was sent" in record.message
    caplog.clear()
    SkippedSteps(AlgorithmConfig(advantage="turn"), EngineConfig()).step(1, [group(episode([0.5], 0.0))], None)
    assert not caplog.records


def test_a_batch_that_is_nearly_solved_is_no_reason_to_warn(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    solved = group(episode([None], 1.0), episode([None], 1.0))
    failed = group(episode([None], 0.0), episode([None], 0.0))
    steps = SkippedSteps(EPISODE, EngineConfig())
    steps.step(11, [*[solved] * 18, failed], "zero_variance")
    assert [(record.levelname, record.message) for record in caplog.records] == [
        ("INFO", "step 11 had nothing to learn from: 36 of 38 episodes succeeded, and in no group did they differ")
    ]
    steps.step(12, [solved, failed], "zero_variance")
    assert caplog.records[-1].levelname == "WARNING"
    assert "step 12 trained nothing" in caplog.records[-1].message
