"""Which finished groups go into a batch, as `algorithm.keep` says.

Invariant: no more groups are left out for a batch than `max_groups_per_step` allows; after that every group is kept, so a
run whose groups all teach nothing still takes its steps, and `engine.stop_after_skipped` can end it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from agentrl.algo.advantages import ADVANTAGES, GroupAdvantages
from agentrl.algo.advantages.parts import Float64Array
from agentrl.algo.batch_advantages import advantages_by
from agentrl.algo.config import AlgorithmConfig
from agentrl.algo.slots import Loaded, Slot, load_without_torch, slot_of
from agentrl.errors import ConfigError
from agentrl.types import Group

BATCHES: Final = 4
"""Batches' worth of groups that are played for one at most, where the run file does not say."""
FILTERED: Final = "filtered"
"""The reason under which a group that is left out is counted as dropped."""


def load_filter(algorithm: AlgorithmConfig) -> GroupFilter:
    """Load the function of `algorithm.keep`.

    Raises:
        ConfigError: it is not there, does not take its options, or imports torch.
    """
    slots = algorithm.slots
    estimate: Loaded[Sequence[Float64Array]] = load_without_torch(_judged_by(slots.advantage), Sequence)
    return GroupFilter(algorithm, load_without_torch(slots.keep, object), estimate)


class GroupFilter:
    """Asks the function of `algorithm.keep` about each finished group."""

    def __init__(
        self, algorithm: AlgorithmConfig, function: Loaded[object], estimate: Loaded[Sequence[Float64Array]]
    ) -> None:
        """Ask `function`, the loaded `algorithm.keep`, which may want to know the advantages by `estimate`."""
        most = algorithm.slots.max_groups_per_step or BATCHES * algorithm.groups_per_step
        self._function, self._estimate = function, estimate
        self._spare = most - algorithm.groups_per_step
        self._left_out = 0
        self._version = -1

    def keeps(self, group: Group, version: int) -> bool:
        """Return whether `group` may be trained; `version` is that of the trainer, by which batches are told apart."""
        if version != self._version:
            self._version, self._left_out = version, 0
        if self._left_out >= self._spare:
            return True
        kept = self._function(group, *self._numbers(group))
        if not isinstance(kept, bool | np.bool_):
            kind = type(kept).__name__
            raise ConfigError(f"{self._function.where} returned a {kind} for group {group.index}; return True or False")
        self._left_out += not kept
        return bool(kept)

    def _numbers(self, group: Group) -> tuple[GroupAdvantages, ...]:
        if "advantages" not in self._function.slot.needs:
            return ()
        return (advantages_by(group, self._estimate, name=self._estimate.slot.name),)


def _judged_by(advantage: Slot) -> Slot:
    """Return an advantage that is 0 for the groups for which `advantage` is, and needs nothing but the group."""
    if not advantage.needs:
        return advantage
    name = "turn" if "values" in advantage.needs else "dr_grpo"
    return slot_of(advantage.field, name, ADVANTAGES)
