"""How a run under test announces what it does now: one line `PHASE STEPS` in a pipe, steps being those that have ended.
An episode with a child process of its own adds the child's id.

Invariant: a line is written when its phase begins. Without the environment variable nothing is announced.
"""

from __future__ import annotations

import os
from typing import Literal, TypeAlias, get_args

Phase: TypeAlias = Literal["rollout", "step", "publication", "checkpoint", "evaluation"]
PHASES: tuple[Phase, ...] = get_args(Phase)
PIPE_VARIABLE = "AGENTRL_CHAOS_PIPE"
"""Holds the descriptor of the pipe."""


class Announcer:
    """Writes the phases of this process's run."""

    def __init__(self) -> None:
        """Write to the pipe that the environment names; processes that this one starts do not have it."""
        pipe = os.environ.pop(PIPE_VARIABLE, None)
        self._pipe = None if pipe is None else int(pipe)
        self.steps = 0
        """Steps that have ended."""

    def announce(self, phase: Phase, child: int | None = None) -> None:
        """Announce that a phase begins, in an episode perhaps that has a `child`."""
        if self._pipe is not None:
            os.write(self._pipe, f"{phase} {self.steps} {'' if child is None else child}\n".encode())


announcer = Announcer()
