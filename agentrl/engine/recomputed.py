"""Log-probs of the sampled tokens of a batch under the trainer's weights, for advantages that weigh episodes by them.

Invariant: each token is computed in the context and at the temperature in which it was sampled.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from agentrl.algo.batch_advantages import GroupLogprobs
from agentrl.trainer.base import Trainer
from agentrl.types import Float32Array, Group, Int32Array, Trajectory


async def recomputed_logprobs(trainer: Trainer, groups: Sequence[Group]) -> Sequence[GroupLogprobs]:
    """Return the log-probs of each group, by a forward pass over its branches, and another for each further temperature.

    Turns that are not trained keep their recorded ones.
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
