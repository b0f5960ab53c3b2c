"""The bundled advantages, by name, a file for each family, and what they give. numpy only: they run in the driver.

Invariant: a function gets a group and its options, and returns one [turns] float64 array for each episode, with exact zeros
where nothing is to be learned.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from agentrl.algo.advantages.episodes import EPISODE_ADVANTAGES
from agentrl.algo.advantages.gae import VALUE_ADVANTAGES
from agentrl.algo.advantages.parts import Float64Array
from agentrl.algo.advantages.turn_returns import TURN_ADVANTAGES
from agentrl.algo.slots import Bundled

ADVANTAGES: dict[str, Bundled] = {**EPISODE_ADVANTAGES, **TURN_ADVANTAGES, **VALUE_ADVANTAGES}
TurnTokens: TypeAlias = tuple[tuple[Float64Array, ...], ...]
"""For each episode and turn: [output tokens] float64."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupAdvantages:
    """The advantages of one group."""

    per_turn: tuple[Float64Array, ...]
    """For each episode: [turns] float64, indexed like `Trajectory.turns`."""
    zero_variance: bool
    """True when every advantage is exactly 0."""
    per_token: TurnTokens | None = None
    """Advantages of tokens; None: those of a turn share its own."""
    targets: TurnTokens | None = None
    """Targets of the critic; None: there is none."""
