"""Which finished groups go into a batch, as `algorithm.keep` says.

Invariant: no more groups are left out for a batch than `max_groups_per_step` allows; after that every group is kept, so a
run whose groups all teach nothing still takes its steps, and `engine.stop_after_skipped` can end it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from agentrl.algo.config import AlgorithmConfig
from agentrl.algo.slots import Loaded, load_without_torch
from agentrl.errors import ConfigError
from agentrl.types import Group

BATCHES: Final = 4
"""Batches' worth of groups that are played for one at most, where the run file does not say."""
FILTERED: Final = "filtered"
"""The reason under which a group that is left out is counted as dropped."""


def load_filter(algorithm: AlgorithmConfig) -> GroupFilter | None:
    """Load the functions that run in the driver, so that a run without them does not start; None: every group is kept.

    Raises:
        ConfigError: one of them is not there, does not take its options, or imports torch.
    """
    slots = algorithm.slots
    load_without_torch(slots.advantage, Sequence)
    return None if slots.keep.name == "all" else GroupFilter(algorithm, load_without_torch(slots.keep, object))


class GroupFilter:
    """Asks the function of `algorithm.keep` about each finished group."""

    def __init__(self, algorithm: AlgorithmConfig, function: Loaded[object]) -> None:
        """Ask `function`, the loaded `algorithm.keep`."""
        most = algorithm.slots.max_groups_per_step or BATCHES * algorithm.groups_per_step
        self._function = function
        self._spare = most - algorithm.groups_per_step
        self._left_out = 0
        self._version = -1

    def keeps(self, group: Group, version: int) -> bool:
        """Return whether `group` may be trained; `version` is that of the trainer, by which batches are told apart."""
        if version != self._version:
            self._version, self._left_out = version, 0
        if self._left_out >= self._spare:
            return True
        kept = self._function(group)
        if not isinstance(kept, bool | np.bool_):
            kind = type(kept).__name__
            raise ConfigError(f"{self._function.where} returned a {kind} for group {group.index}; return True or False")
        self._left_out += not kept
        return bool(kept)
