"""Small turns and episodes without a client, for properties of advantages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from agentrl.types import BranchPath, EpisodeFailure, StopReason, Trajectory, Turn, VersionSpan


def plain_turn(
    reward: float | None = None,
    parent: int | None = None,
    *,
    sent_after: int | None = None,
    sent_at: int | None = None,
    rewarded_at: int | None = None,
    player: str = "",
    branch: BranchPath = (),
    tokens: int = 1,
    context: int = 1,
) -> Turn:
    """Return a turn; it was sent right after its parent was complete, unless `sent_after` says otherwise.

    Without times of its own it was sent right after turn `sent_after` - 1 was complete and rewarded; see `episode`.
    """
    if sent_after is None:
        sent_after = 0 if parent is None else parent + 1
    return Turn(
        context_ids=np.arange(context, dtype=np.int32),
        output_ids=np.arange(tokens, dtype=np.int32),
        output_logprobs=np.full(tokens, -0.5, np.float32),
        spans=(VersionSpan(start=0, end=tokens, version=0),) if tokens else (),
        stop_reason=StopReason.STOP,
        reward=reward,
        player=player,
        branch=branch,
        parent=parent,
        sent_after=sent_after,
        sent_at=2 * sent_after + 1 if sent_at is None else sent_at,
        rewarded_at=rewarded_at,
    )


def plain_episode(turns: Sequence[Turn], final: float | None = None, failure: EpisodeFailure | None = None) -> Trajectory:
    """Return an episode; a reward without a time was set when its turn was complete."""
    turns = [
        replace(one, rewarded_at=2 * at + 2) if one.reward is not None and one.rewarded_at is None else one
        for at, one in enumerate(turns)
    ]
    return Trajectory(
        episode_id="e",
        task_id="t",
        turns=tuple(turns),
        stop_reason=StopReason.COMPLETED,
        final_reward=final,
        failure=failure,
    )
