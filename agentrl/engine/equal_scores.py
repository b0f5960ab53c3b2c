"""Groups whose members all get one and the same score: a warning, once, because such groups teach nothing.

Invariant: only groups that `score_group` gave scores are looked at, whether a step trains them later or not.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final

from agentrl.types import Trajectory

logger = logging.getLogger(__name__)

WINDOW: Final = 16
"""Groups in a row that must have equal scores."""


class EqualScores:
    """Watches the scored groups of a run.

    Example:
        >>> watch = EqualScores()
        >>> watch.see(())
    """

    def __init__(self) -> None:
        """Start before the first group."""
        self._in_a_row = 0
        self._has_warned = False

    def see(self, scored: Sequence[Trajectory]) -> None:
        """Count a group as `score_group` left it; what failed, got advantages or has rewarded turns does not count."""
        if len(scored) < 2 or any(each.failure is not None or each.advantage is not None for each in scored):
            return
        if any(turn.reward is not None for each in scored for turn in each.turns):
            return
        equal = len({each.final_reward for each in scored}) == 1
        self._in_a_row = self._in_a_row + 1 if equal else 0
        if self._in_a_row == WINDOW and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "score_group gave all members of a group one and the same score, in %d groups in a row. A member is "
                "compared with the others, so these groups teach nothing. Score each member by what it adds to the "
                "group, or return MemberAdvantages, such as agentrl.reward.pass_at_k.pass_at_k(scores); if the tasks are "
                "all solved, or none is, use others",
                WINDOW,
            )
