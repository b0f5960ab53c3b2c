"""The record of an episode that another program played: of a run that trained nothing, graded where a reward is known."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from agentrl_viewer.exchange.atif_messages import WireMessage

EpisodeRecord: TypeAlias = dict[str, Any]
"""As a line of `episodes/step-NNNNNN.jsonl` has it."""


class ReadEpisode(NamedTuple):
    """An episode of a file of another program."""

    record: EpisodeRecord
    closing: dict[int, list[WireMessage]]
    """The messages that followed the last answer of a conversation, by its turn: no model call has read them."""


def foreign_record(
    episode_id: str,
    task_id: str,
    *,
    task: Mapping[str, Any],
    turns: Sequence[EpisodeRecord],
    reward: float | None,
    metrics: Mapping[str, float],
    seconds: float | None,
    failure: Mapping[str, str] | None = None,
) -> EpisodeRecord:
    """Return the record; `seconds` is how long the episode took."""
    return {
        "purpose": "evaluation",
        "group": None,
        "step": 0,
        "policy_version": 0,
        "episode_id": episode_id,
        "task_id": task_id,
        "task": {name: value for name, value in task.items() if value is not None},
        "stop_reason": "completed" if failure is None else "workflow_error",
        "final_reward": reward,
        "episode_return": reward,
        "success": None if reward is None else reward > 0,
        "failure": failure,
        "metrics": metrics,
        "started_s": None if seconds is None else 0.0,
        "ended_s": seconds,
        "turns": turns,
    }
