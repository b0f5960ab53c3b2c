"""The log-probs that a trainer gives for the turns of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from agentrl.algo.batch_advantages import batch_advantages
from agentrl.algo.config import AlgorithmConfig
from agentrl.engine.estimates import recomputed_logprobs
from agentrl.errors import InvariantError
from agentrl.trainer.scripted import ScriptedTrainer
from agentrl.types import Float32Array, Group, Int32Array, Task
from agentrl.weights.types import scripted_logprobs
from agentrl_testing.properties.plain_episodes import plain_episode, plain_turn


class Recording(ScriptedTrainer):
    asked: tuple[list[list[int]], list[float]]

    async def logprobs(
        self, sequences: Sequence[Int32Array], temperatures: Sequence[float] | None = None
    ) -> list[Float32Array]:
        self.asked = [ids.tolist() for ids in sequences], list(temperatures or [])
        return await super().logprobs(sequences, temperatures)


async def test_each_trained_turn_gets_the_trainers_logprobs_of_its_branch_and_temperature() -> None:
    root = plain_turn(1.0, tokens=2, context=3)
    left, right = plain_turn(parent=0, tokens=1, context=2), plain_turn(parent=0, tokens=3)
    hot, greedy = replace(right, temperature=0.5), replace(right, temperature=0.0)
    episode = plain_episode([root, left, hot, greedy])
    group = Group(index=0, task=Task(id="t", data={}), episodes=(episode,), admitted_version=0)
    trainer = Recording()
    [[found]] = await recomputed_logprobs(trainer, [group])
    branches = [branch.token_ids for branch in episode.branches()]
    assert trainer.asked == ([ids.tolist() for ids in branches[:2]], [1.0, 0.5])  # no forward pass for the greedy branch
    expected = [scripted_logprobs(ids, 0) for ids in branches[:2]]
    np.testing.assert_array_equal(found[0], expected[0][2:4])
    np.testing.assert_array_equal(found[1], expected[0][6:7])
    np.testing.assert_array_equal(found[2], expected[1][5:8])
    np.testing.assert_array_equal(found[3], greedy.output_logprobs)


def test_an_advantage_that_needs_logprobs_is_not_given_a_batch_without_them() -> None:
    episode = plain_episode([plain_turn(1.0)])
    group = Group(index=0, task=Task(id="t", data={}), episodes=(episode, episode), admitted_version=0)
    with pytest.raises(InvariantError, match=r"off_policy_baseline needs the log-probs of the trainer"):
        batch_advantages([group], AlgorithmConfig(advantage="off_policy_baseline", group_size=2))
