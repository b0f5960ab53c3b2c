"""A rubric's reward is the weighted sum of its parts, and each part is a metric."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import anyio
import pytest

from agentrl.client import Client
from agentrl.env import environment_boundary
from agentrl.errors import ConfigError, EnvironmentFault, RewardError
from agentrl.types import StopReason, Task
from agentrl_rewards.rubric import Rubric
from tests.rollout.harness import ask, episode, make_renderer, workflow_of


def right(answer: str, expected: str) -> float:
    return float(answer == expected)


async def brief(answer: str, expected: str) -> bool:
    await anyio.lowlevel.checkpoint()
    return len(answer) < 3


def recorded_in(metrics: dict[str, float]) -> Callable[..., None]:
    def record(**values: float) -> None:
        metrics.update(values)

    return record


async def test_the_reward_is_the_weighted_sum_and_each_part_is_recorded() -> None:
    recorded: dict[str, float] = {}
    rubric = Rubric(correct=(1.0, right), brief=(-0.25, brief))
    assert await rubric("4", "4", record=recorded_in(recorded)) == 0.75
    assert recorded == {"correct": 1.0, "brief": 1.0}
    assert await rubric("four", "4") == 0.0


async def test_the_parts_of_an_episodes_rubric_are_metrics_of_its_trajectory(tmp_path: Path) -> None:
    rubric = Rubric(correct=(1.0, right), format=(0.1, brief))

    async def run(task: Task, client: Client) -> float:
        return await rubric(await ask(client, task["question"]), task["answer"], record=client.record)

    trajectory = await episode(workflow_of(run), make_renderer(tmp_path))
    assert trajectory.final_reward == 1.0
    assert trajectory.metrics == {"correct": 1.0, "format": 0.0}


@pytest.mark.parametrize("value", [math.nan, math.inf, "1.0", None])
async def test_a_part_that_is_no_number_makes_no_reward_and_nothing_is_recorded(value: object) -> None:
    recorded: dict[str, float] = {}
    rubric = Rubric(correct=(1.0, right), odd=(0.1, lambda *_: cast("float", value)))
    with pytest.raises(RewardError, match=r"Rubric\.odd: a reward must be a finite number"):
        await rubric("4", "4", record=recorded_in(recorded))
    assert recorded == {}


async def test_a_part_whose_grader_broke_makes_the_episode_an_environment_fault(tmp_path: Path) -> None:
    async def broken(answer: str, expected: str) -> float:
        with environment_boundary("grader"):
            raise OSError("gone")

    rubric = Rubric(correct=(1.0, right), graded=(1.0, broken))
    with pytest.raises(EnvironmentFault, match="gone"):
        await rubric("4", "4")

    async def run(task: Task, client: Client) -> float:
        return await rubric(await ask(client, task["question"]), task["answer"])

    trajectory = await episode(workflow_of(run), make_renderer(tmp_path))
    assert (trajectory.stop_reason, trajectory.final_reward) == (StopReason.ENVIRONMENT_FAULT, None)


@pytest.mark.parametrize("parts", [{}, {"a": right}, {"a": (1.0, 2.0)}, {"a": (math.nan, right)}, {"a": ("1", right)}])
def test_parts_that_are_not_weight_and_function_are_refused(parts: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="Rubric: "):
        Rubric(**parts)
