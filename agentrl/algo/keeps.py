"""Which groups are trained: functions of a group, for `algorithm.keep`. numpy only: they run in the driver.

Invariant: a batch of kept groups is conditioned on what the function asks for, so its figures are not those of all groups.
"""

from __future__ import annotations

from agentrl.algo.advantages import GroupAdvantages
from agentrl.algo.slots import Bundled, NoOptions, row
from agentrl.types import Group

KEEPS: dict[str, Bundled] = {}
EQUAL = 1e-9
"""Returns that differ by less than this part of the largest are equal."""


@row(KEEPS, "all", "all groups")
def every_group(group: Group) -> bool:
    """Keep each group."""
    del group
    return True


@row(KEEPS, "mixed", "groups with an advantage other than 0", needs=("advantages",))
def mixed(group: Group, options: NoOptions, estimate: GroupAdvantages) -> bool:
    """Keep a group that teaches something: a turn whose tokens may be trained has an advantage other than 0.

    With one player and rewards of 0 and 1 it is DAPO's dynamic sampling (arXiv 2503.14476, section 3.2). `estimate` is that
    of `algorithm.advantage`, or, where this needs a model's numbers or the batch, one that finds the same groups equal.
    """
    del options
    return any(
        value != 0 and turn.in_loss and len(turn.output_ids) > 0
        for episode, values in zip(group.episodes, estimate.per_turn, strict=True)
        for turn, value in zip(episode.turns, values.tolist(), strict=True)
    )


def returns_differ(group: Group) -> bool:
    """Return whether the episodes of a group differ in a player's return, or in the advantages that `score_group` gave."""
    if any(episode.advantage is not None for episode in group.episodes):
        return len({episode.advantage for episode in group.episodes}) > 1
    returns = [{"": episode.final_reward or 0.0, **episode.player_returns()} for episode in group.episodes]
    for player in dict.fromkeys(name for one in returns for name in one):
        own = [one.get(player, one[""]) for one in returns]
        if max(own) - min(own) > EQUAL * max(map(abs, own)):
            return True
    return False
