"""The part of each player in the episodes of a group, and its returns.

Invariant: each player's part of an episode counts as an episode; all players share the final reward (ADR 16).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from agentrl.episode.trajectory import are_independent
from agentrl.types import BoolArray, BranchPath, Trajectory, Turn

Float64Array: TypeAlias = NDArray[np.float64]
Int64Array: TypeAlias = NDArray[np.int64]

ROUNDING = 1e-9
"""Advantages up to this part of the group's largest absolute return are rounding: taken as 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PricedTurn(Turn):
    """A turn whose `reward` holds a price beside a reward that was set later."""

    at_once: float = 0.0
    """Part of `reward` that was known when its tokens were sampled: minus the price."""


class Payment(NamedTuple):
    """A part of a turn's reward."""

    amount: float
    moment: int
    """When it was set, by the count of `Turn.rewarded_at`; -1 where there is none."""
    is_price: bool


@dataclass(frozen=True, slots=True)
class PlayerPart:
    """The turns of one player in an episode, [n] each."""

    at: Int64Array
    """Index among all turns."""
    rewards: Float64Array
    """[m], m of at least n: first those of the turns, 0 where a turn has none, then those that were known at once."""
    earners: Int64Array
    """[m] number of the turn that a reward belongs to, among its own."""
    sent_after: Int64Array
    """Number of its own turns that were complete when the request was sent."""
    sent_at: Int64Array
    rewarded_at: Int64Array
    """[m], -1 where there is none."""
    branches: Sequence[BranchPath]
    related: BoolArray
    """[n, n]: whether no declared branch holds the one turn and not the other."""
    final: float

    def total(self) -> float:
        """Return the undiscounted return."""
        return math.fsum(self.rewards) + self.final


def players_of(episodes: Sequence[Trajectory]) -> list[str]:
    """Return the names of the players in the order of their first turns."""
    return list(dict.fromkeys(turn.player for episode in episodes for turn in episode.turns)) or [""]


def part_of(episode: Trajectory, player: str) -> PlayerPart:
    """Return the turns of `player` in `episode`."""
    at = np.array([index for index, turn in enumerate(episode.turns) if turn.player == player], np.int64)
    turns = [episode.turns[index] for index in at.tolist()]
    branches = [turn.branch for turn in turns]
    paid = [(index, *each) for index, turn in enumerate(turns) for each in _payments(turn)]
    # The turns' own rewards first, in their order.
    paid.sort(key=lambda each: each[3])
    return PlayerPart(
        at=at,
        rewards=np.array([amount for _, amount, _, _ in paid], np.float64),
        earners=np.array([index for index, _, _, _ in paid], np.int64),
        sent_after=np.searchsorted(at, np.array([turn.sent_after for turn in turns], np.int64)),
        sent_at=np.array([turn.sent_at for turn in turns], np.int64),
        rewarded_at=np.array([moment for _, _, moment, _ in paid], np.int64),
        branches=branches,
        related=_related(branches),
        final=episode.final_reward or 0.0,
    )


def _payments(turn: Turn) -> Iterator[Payment]:
    """Yield the parts of a turn's reward: its own, 0 where there is none, then its price if that was set earlier."""
    at_once = turn.at_once if isinstance(turn, PricedTurn) else 0.0
    yield Payment((turn.reward or 0.0) - at_once, -1 if turn.rewarded_at is None else turn.rewarded_at, is_price=False)
    if at_once:
        yield Payment(at_once, turn.sent_at + 1, is_price=True)


def is_rounding(differences: Float64Array, returns: Float64Array) -> bool:
    """Return whether `differences` of `returns` are all 0 up to rounding."""
    return float(np.abs(differences).max(initial=0.0)) <= ROUNDING * float(np.abs(returns).max(initial=0.0))


def over_root_mean_square(arrays: Sequence[Float64Array], values: Float64Array) -> list[Float64Array]:
    """Return `arrays` over the root mean square of `values`, of which one is not 0."""
    largest = float(np.abs(values).max())
    # Scaled by the largest first: squares of tiny or huge rewards would leave the range of a float.
    spread = math.sqrt(exact_mean((values / largest) ** 2))
    return [array / largest / spread for array in arrays]


def exact_mean(values: Float64Array) -> float:
    """Return the mean, from a sum without rounding."""
    return math.fsum(values) / len(values)


def _related(branches: Sequence[BranchPath]) -> BoolArray:
    if not any(branches):
        return np.ones((len(branches), len(branches)), np.bool_)
    return np.array([[not are_independent(one, other) for other in branches] for one in branches], np.bool_)
