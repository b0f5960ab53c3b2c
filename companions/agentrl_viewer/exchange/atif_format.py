"""The Agent Trajectory Interchange Format (ATIF) 1.7 and 1.8, as Harbor specifies it: one JSON document an episode.

Readers refuse unknown fields, so what the format lacks stands in `extra`, under `agentrl`. A value that is not known is left
out. Readers of agentrl skip fields that they do not know.
"""

from __future__ import annotations

from typing import Any, Final, Literal, TypeAlias

import msgspec

Extra: TypeAlias = dict[str, Any]
WRITTEN_VERSION: Final = "ATIF-v1.7"
"""The version of what agentrl writes: 1.8 adds audio, which it never writes."""
OURS: Final = "agentrl"
"""The key of every `extra` below which agentrl keeps what the format has no field for."""


class AtifSource(msgspec.Struct, omit_defaults=True):
    """Where an image or a sound is."""

    media_type: str
    path: str
    duration_sec: float | None = None


class AtifPart(msgspec.Struct, omit_defaults=True):
    """A part of a message."""

    type: str
    text: str | None = None
    source: AtifSource | None = None


AtifContent: TypeAlias = str | list[AtifPart]


class AtifToolCall(msgspec.Struct, omit_defaults=True):
    """A tool call of an agent step."""

    tool_call_id: str
    function_name: str
    arguments: dict[str, Any]
    extra: Extra | None = None


class AtifReference(msgspec.Struct, omit_defaults=True):
    """A trajectory of a sub-agent: embedded in the document, or a file."""

    trajectory_id: str | None = None
    trajectory_path: str | None = None


class AtifResult(msgspec.Struct, omit_defaults=True):
    """What a tool, or the environment, answered."""

    source_call_id: str | None = None
    content: AtifContent | None = None
    subagent_trajectory_ref: list[AtifReference] | None = None
    extra: Extra | None = None


class AtifObservation(msgspec.Struct):
    """All that was answered to a step."""

    results: list[AtifResult]


class AtifMetrics(msgspec.Struct, omit_defaults=True):
    """Tokens of one model call."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    prompt_token_ids: list[int] | None = None
    completion_token_ids: list[int] | None = None
    logprobs: list[float] | None = None
    extra: Extra | None = None


class AtifStep(msgspec.Struct, omit_defaults=True):
    """A message of the system or the user, or an answer of the agent with what was answered to it."""

    step_id: int
    source: Literal["system", "user", "agent"]
    message: AtifContent
    timestamp: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[AtifToolCall] | None = None
    observation: AtifObservation | None = None
    metrics: AtifMetrics | None = None
    extra: Extra | None = None
    llm_call_count: int | None = None
    is_copied_context: bool | None = None


class AtifAgent(msgspec.Struct, omit_defaults=True):
    """The agent, its model and its tools."""

    name: str
    version: str
    model_name: str | None = None
    tool_definitions: list[dict[str, Any]] | None = None
    extra: Extra | None = None


class AtifFinalMetrics(msgspec.Struct, omit_defaults=True):
    """Sums over a trajectory."""

    total_prompt_tokens: int | None = None
    total_completion_tokens: int | None = None
    total_cached_tokens: int | None = None
    total_cost_usd: float | None = None
    total_steps: int | None = None
    extra: Extra | None = None


class AtifTrajectory(msgspec.Struct, omit_defaults=True):
    """A whole document, or one that is embedded in it."""

    schema_version: str
    agent: AtifAgent
    steps: list[AtifStep]
    session_id: str | None = None
    trajectory_id: str | None = None
    notes: str | None = None
    final_metrics: AtifFinalMetrics | None = None
    extra: Extra | None = None
    subagent_trajectories: list[AtifTrajectory] | None = None


def ours(extra: Extra | None) -> Extra:
    """Return what agentrl wrote into an `extra`."""
    found = (extra or {}).get(OURS)
    return found if isinstance(found, dict) else {}
