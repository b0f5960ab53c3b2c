"""Small episodes, groups and configs for the tests of agentrl.algo."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from agentrl.algo.batch_advantages import advantages
from agentrl.algo.config import AlgorithmConfig
from agentrl.types import Group, Task, Trajectory
from agentrl_testing.properties.exact_gradients import Estimator
from agentrl_testing.properties.plain_episodes import plain_episode as episode
from agentrl_testing.properties.plain_episodes import plain_turn as turn

__all__ = ["EPISODE", "TURN", "by", "episode", "group", "linear", "pad_right", "turn"]
DType = TypeVar("DType", bound=np.generic)


def linear(rewards: Sequence[float | None], final: float | None = None) -> Trajectory:
    return episode([turn(reward, index - 1 if index else None) for index, reward in enumerate(rewards)], final)


def group(episodes: Sequence[Trajectory]) -> Group:
    return Group(index=3, task=Task(id="t", data={}), episodes=tuple(episodes), admitted_version=0)


def pad_right(arrays: Sequence[NDArray[DType]]) -> NDArray[DType]:
    """Return arrays as rows of [B, longest], filled up with zeros."""
    padded = np.zeros((len(arrays), max(len(array) for array in arrays)), arrays[0].dtype)
    for row, array in zip(padded, arrays, strict=True):
        row[: len(array)] = array
    return padded


EPISODE = AlgorithmConfig(advantage="episode", group_size=2)
TURN = AlgorithmConfig(advantage="turn", group_size=2)
"""Every group with something to compare is whole: it has at least `group_size` episodes."""


def by(config: AlgorithmConfig) -> Estimator:
    return lambda episodes: advantages(group(episodes), config).per_turn


def changed(config: AlgorithmConfig, fields: Mapping[str, object]) -> AlgorithmConfig:
    """Return `config` with other fields, short ones too."""
    return AlgorithmConfig.model_validate({**config.model_dump(exclude_unset=True), **fields})


def discount_of(config: AlgorithmConfig) -> float:
    """Return the discount of the turn advantage."""
    return float(str(config.slots.advantage.given.get("discount", 1.0)))
