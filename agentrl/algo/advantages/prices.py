"""Prices of turns: what a turn costs by its own tokens, such as their KL to a reference, or an answer that is too long.

Invariant: a price is known when its tokens are sampled, so it is credited to the turn and to what was sent before, and to
nothing that was sent later, whenever the workflow's own reward of the turn is set.
"""

from __future__ import annotations

from dataclasses import fields, replace

from agentrl.algo.advantages.players import PricedTurn
from agentrl.types import Turn


def priced(turn: Turn, price: float) -> Turn:
    """Return `turn` with `price` taken off its reward, paid before anything that was sent later."""
    moment = turn.sent_at + 1  # the next event of the episode has this number at the earliest
    before = turn.at_once if isinstance(turn, PricedTurn) else 0.0
    if turn.reward is None or (turn.rewarded_at == moment and not before):
        return replace(turn, reward=(turn.reward or 0.0) - price, rewarded_at=moment)
    same = {each.name: getattr(turn, each.name) for each in fields(Turn) if each.name != "reward"}
    return PricedTurn(**same, reward=turn.reward - price, at_once=before - price)
