"""Lines of the index of episodes."""

from __future__ import annotations

import msgspec

from agentrl.episode.summary import EpisodeSummary


def episode_summary(number: int, **changes: object) -> EpisodeSummary:
    """Return the summary of the training episode `number`, with `changes`."""
    first = EpisodeSummary(
        episode_id=str(number),
        task_id="t",
        purpose="training",
        group=number // 8,
        step=1 + number // 64,
        policy_version=1,
        started_s=0.0,
        ended_s=1.0,
        episode_return=float(number),
        final_reward=float(number),
        success=True,
        turns=1,
        output_tokens=5,
        context_tokens=5,
        branches=1,
        forks={},
        stop_reason="completed",
        failure=None,
        players=[],
        min_version=1,
        max_version=1,
        file="step-000001",
        line=number + 1,
    )
    return msgspec.structs.replace(first, **changes)
