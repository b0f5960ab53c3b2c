"""The lines of a workflow that raise right after a turn of the policy.

Invariant: each line is warned about once. An episode that fails has no reward, so where the model's output makes a workflow
raise, the policy is never told.
"""

from __future__ import annotations

import logging
from collections import Counter, deque

from agentrl.types import Trajectory

logger = logging.getLogger(__name__)


class AfterTurnErrors:
    """Counts, by line, the training episodes in which a workflow raised right after a turn."""

    WINDOW = 64
    """Number of recent episodes that a line's share is of."""
    SHARE = 0.05
    """A line with more of the window than this is warned about."""

    def __init__(self) -> None:
        """Begin with none."""
        self.by_line: Counter[str] = Counter()
        """Attempts so far, by line."""
        self._recent: deque[str | None] = deque(maxlen=self.WINDOW)
        self._warned: set[str] = set()

    def record(self, episode: Trajectory) -> None:
        """Count one finished attempt."""
        line = None if episode.failure is None else episode.failure.after_turn
        self._recent.append(line)
        if episode.failure is None or line is None:
            return
        self.by_line[line] += 1
        count = self._recent.count(line)
        if line not in self._warned and count > self.SHARE * self.WINDOW:
            self._warned.add(line)
            logger.warning(
                "%s raised right after a model turn in %d of the last %d episodes (the last one: %s). A failed episode has "
                "no reward, so the policy never learns to avoid it. Where the model's output is the cause, return a "
                "reward instead (docs/howto/agent.md); where a backend is, raise agentrl.EnvironmentFault",
                line,
                count,
                len(self._recent),
                episode.failure.message,
            )
