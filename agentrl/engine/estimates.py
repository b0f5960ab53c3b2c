"""Numbers that the trainer's models give to the tokens of a batch before it is trained, for the estimate of its advantages.

Invariant: each turn has one number for each of its output tokens, under the weights before the step, in the context and at
the temperature in which it was sampled. A turn that several branches share has those of the first of them: what comes before
it is the same in all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from agentrl.algo.batch_advantages import GroupLogprobs
from agentrl.algo.config import AlgorithmConfig
from agentrl.engine.batch import VerifiedGroups
from agentrl.trainer.base import Trainer
from agentrl.types import Float32Array, Group, Int32Array, Sample, Trajectory


async def with_estimates(found: VerifiedGroups, trainer: Trainer, algorithm: AlgorithmConfig) -> VerifiedGroups:
    """Return verified groups with the numbers that `algorithm` needs.

    Cancellation: the trainer cannot be used again.
    """
    groups = found.groups
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


async def recomputed_logprobs(trainer: Trainer, groups: Sequence[Group]) -> Sequence[GroupLogprobs]:
    """Return the log-probs of each group, by a forward pass over its branches, and another for each further temperature.

    Each token is computed in the context and at the temperature in which it was sampled. Turns that are not trained keep
    their recorded ones.
    """
    asked = _Asked()
    result: list[list[list[Float32Array]]] = []
    for group in groups:
        result.append([[turn.output_logprobs for turn in episode.turns] for episode in group.episodes])
        for episode, found in zip(group.episodes, result[-1], strict=True):
            asked.add(episode, found)
    computed = await trainer.logprobs(asked.sequences, asked.temperatures)
    for found, turn, sequence, places in asked.turns:
        found[turn] = computed[sequence][places - 1]  # nothing predicts the first token
    return result


class _Asked:
    """The sequences that the trainer is asked for, and the turns in them."""

    def __init__(self) -> None:
        self.sequences: list[Int32Array] = []
        self.temperatures: list[float] = []
        self.turns: list[tuple[list[Float32Array], int, int, NDArray[np.intp]]] = []
        """For each turn: the log-probs of its episode, its number, the sequence, and the places of its output tokens."""

    def add(self, episode: Trajectory, found: list[Float32Array]) -> None:
        for branch in episode.branches():
            sequences: dict[float, int] = {}
            for turn in np.unique(branch.turn_index[branch.loss_mask]).tolist():
                temperature = episode.turns[turn].temperature
                if temperature not in sequences:
                    sequences[temperature] = len(self.sequences)
                    self.sequences.append(branch.token_ids)
                    self.temperatures.append(temperature)
                places = np.flatnonzero(branch.loss_mask & (branch.turn_index == turn))
                self.turns.append((found, turn, sequences[temperature], places))
