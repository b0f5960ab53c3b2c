"""What the trainer's models say about the tokens of a batch before it is trained, for the estimate of its advantages.

Invariant: each turn has one number for each of its output tokens, under the weights before the step. A turn that several
branches share has those of the first of them: what comes before it is the same in all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import anyio.to_thread
import numpy as np

from agentrl.algo.batch_advantages import GroupLogprobs
from agentrl.algo.config import AlgorithmConfig
from agentrl.engine.recomputed import recomputed_logprobs
from agentrl.tokens.verify import verify
from agentrl.trainer.base import Trainer
from agentrl.types import Float32Array, Group, Int32Array, Sample

ByTurn: TypeAlias = Sequence[Sequence[Sequence[Float32Array]]]
"""For each group, episode and turn: [output tokens] float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifiedGroups:
    """The groups of a batch, proven, with what models say about their tokens."""

    groups: Sequence[Group]
    branches: Sequence[Sequence[Sequence[Sample]]]
    """For each group and episode: its branches."""
    values: ByTurn | None = None
    """Of the critic; None: there is none."""
    logprobs: Sequence[GroupLogprobs] | None = None
    """Under the trainer's weights; None: the advantage does not need them."""
    reference_logprobs: ByTurn | None = None
    """Of the reference, nats; None: rewards do not need them."""

    @classmethod
    def of(cls, groups: Sequence[Group]) -> VerifiedGroups:
        """Return `groups` without a model's numbers; raises as `verified_groups`."""
        return cls(groups=groups, branches=[[verify(episode) for episode in group.episodes] for group in groups])


async def verified_groups(groups: Sequence[Group], trainer: Trainer, algorithm: AlgorithmConfig) -> VerifiedGroups:
    """Return `groups` with their branches, and with the numbers that `algorithm` needs.

    Raises:
        InvariantError: a branch does not reproduce what its server saw.

    Cancellation: the trainer cannot be used again.
    """
    found = await anyio.to_thread.run_sync(VerifiedGroups.of, groups)
    if "values" in algorithm.slots.needs:
        values = await trainer.values(_sequences(found.branches))
        found = replace(found, values=by_turn(groups, found.branches, values))
    if "logprobs" in algorithm.slots.advantage.needs:
        found = replace(found, logprobs=await recomputed_logprobs(trainer, groups))
    if algorithm.reference is not None and algorithm.reference.reward_weight:
        temperatures = [sample.temperatures for sample in _every_sample(found.branches)]
        logprobs = await trainer.reference_logprobs(_sequences(found.branches), temperatures)
        found = replace(found, reference_logprobs=by_turn(groups, found.branches, logprobs))
    return found


def by_turn(
    groups: Sequence[Group], branches: Sequence[Sequence[Sequence[Sample]]], found: Sequence[Float32Array]
) -> list[list[list[Float32Array]]]:
    """Return the numbers of each turn from those of tokens 1.. of each branch, in the order of the branches."""
    rest = iter(found)
    result: list[list[list[Float32Array]]] = []
    for group, of_group in zip(groups, branches, strict=True):
        episodes: list[list[Float32Array]] = []
        for episode, of_episode in zip(group.episodes, of_group, strict=True):
            turns: dict[int, Float32Array] = {}
            for sample in of_episode:
                numbers = np.concatenate([np.zeros(1, np.float32), next(rest)])
                for turn in np.unique(sample.turn_index).tolist():
                    count = len(episode.turns[turn].output_ids)
                    at = np.flatnonzero(sample.turn_index == turn)
                    turns.setdefault(turn, numbers[at[len(at) - count :]])
            episodes.append([turns[turn] for turn in range(len(episode.turns))])
        result.append(episodes)
    return result


def _sequences(branches: Sequence[Sequence[Sequence[Sample]]]) -> list[Int32Array]:
    return [sample.token_ids for sample in _every_sample(branches)]


def _every_sample(branches: Sequence[Sequence[Sequence[Sample]]]) -> list[Sample]:
    return [sample for of_group in branches for of_episode in of_group for sample in of_episode]
