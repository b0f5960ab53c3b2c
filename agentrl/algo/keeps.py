"""Which groups are trained: functions of a group, for `algorithm.keep`. numpy only: they run in the driver.

Invariant: a batch of kept groups is conditioned on what the function asks for, so its figures are not those of all groups.
"""

from __future__ import annotations

from agentrl.algo.slots import Bundled, NoOptions
from agentrl.types import Group

EQUAL = 1e-9
"""Returns that differ by less than this part of the largest are equal."""


def every_group(group: Group) -> bool:
    """Keep each group."""
    del group
    return True


def mixed_returns(group: Group, options: NoOptions) -> bool:
    """Keep a group whose episodes differ in their return (DAPO's dynamic sampling, arXiv 2503.14476, section 3.2)."""
    del options
    if any(episode.advantage is not None for episode in group.episodes):
        return len({episode.advantage for episode in group.episodes}) > 1
    returns = [episode.episode_return for episode in group.episodes]
    return max(returns) - min(returns) > EQUAL * max(map(abs, returns))


KEEPS: dict[str, Bundled] = {
    "all": Bundled(function="agentrl.algo.keeps:every_group", formula="all groups"),
    "mixed": Bundled(function="agentrl.algo.keeps:mixed_returns", formula="groups whose returns differ"),
}
