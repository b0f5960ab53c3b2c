"""The advantages of a group, as an estimate gives them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from agentrl.algo.advantages.players import Float64Array

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
