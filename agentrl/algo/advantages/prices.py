"""Prices of turns: what a turn costs by its own tokens, such as their KL to a reference, or an answer that is too long.

Invariant: a price is known when its tokens are sampled, so it is credited to the turn and to what was sent before, and to
nothing that was sent later, whenever the workflow's own reward of the turn is set.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

from agentrl.types import Turn


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


def priced(turn: Turn, price: float) -> Turn:
    """Return `turn` with `price` taken off its reward, paid before anything that was sent later."""
    moment = turn.sent_at + 1  # the next event of the episode has this number at the earliest
    before = turn.at_once if isinstance(turn, PricedTurn) else 0.0
    if turn.reward is None or (turn.rewarded_at == moment and not before):
        return replace(turn, reward=(turn.reward or 0.0) - price, rewarded_at=moment)
    same = {each.name: getattr(turn, each.name) for each in fields(Turn) if each.name != "reward"}
    return PricedTurn(**same, reward=turn.reward - price, at_once=before - price)


def payments(turn: Turn) -> Iterator[Payment]:
    """Yield the parts of a turn's reward: its own, 0 where there is none, then its price if that was set earlier."""
    at_once = turn.at_once if isinstance(turn, PricedTurn) else 0.0
    yield Payment((turn.reward or 0.0) - at_once, -1 if turn.rewarded_at is None else turn.rewarded_at, is_price=False)
    if at_once:
        yield Payment(at_once, turn.sent_at + 1, is_price=True)
