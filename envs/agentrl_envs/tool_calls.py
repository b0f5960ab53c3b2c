"""The tool calls of an assistant message, and the messages that answer them.

Invariant: every call is answered, also one whose arguments are no JSON object: it carries the text that tells the policy so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

from agentrl.env import ChatStep, EpisodeEnd
from agentrl.support.exact_json import decode_exact_json
from agentrl.types import JsonValue, Message


class ToolCall(NamedTuple):
    """One call that the policy made."""

    id: str
    name: str
    arguments: Mapping[str, JsonValue]
    problem: str = ""
    """The reason for which it cannot be made; empty: it can."""


def tool_calls_of(message: Message) -> list[ToolCall]:
    """Return the calls of an assistant message, in order."""
    return [_read_wire_call(call) for call in cast("Sequence[Mapping[str, Any]]", message.get("tool_calls") or ())]


def has_text(message: Message) -> bool:
    """Return whether an assistant message says something."""
    return bool(str(message.get("content") or "").strip())


def tool_reply(call: ToolCall, text: str) -> Message:
    """Return the message that answers a call."""
    return {"role": "tool", "tool_call_id": call.id, "content": text}


def graded_end(is_right: bool, *, end: EpisodeEnd = EpisodeEnd.TERMINATED) -> ChatStep:
    """Return the last step of an episode that pays 1 or 0."""
    return ChatStep(reward=float(is_right), end=end, metrics={"success": float(is_right)})


def _read_wire_call(call: Mapping[str, Any]) -> ToolCall:
    function = call["function"]
    try:
        arguments = decode_exact_json(function["arguments"] or "{}")
    except ValueError as error:
        return ToolCall(call["id"], function["name"], {}, f"Error: the arguments are no JSON: {error}")
    if not isinstance(arguments, dict):
        return ToolCall(call["id"], function["name"], {}, "Error: the arguments must be a JSON object")
    return ToolCall(call["id"], function["name"], cast("Mapping[str, JsonValue]", arguments))
