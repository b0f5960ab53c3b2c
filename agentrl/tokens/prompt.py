"""The prompt of a model call: what it sends, and where its turn will stand.

Invariant: a prompt holds all that its turn keeps of the request, as it was when the request was prepared.
"""

from __future__ import annotations

import msgspec

from agentrl.inference.backend import Context
from agentrl.tokens.history import HistoryMatch
from agentrl.tokens.template.rendering import ToolSchemas
from agentrl.types import ForkReason, Message


class Extension(msgspec.Struct, frozen=True):
    """What a model call adds to the turn that it extends."""

    parent: int | None
    """The extended turn; None for a root."""
    ids: list[int]
    """The context ids between the end of the parent and where the model writes."""
    thinking_open: bool = False
    """Whether the context ends inside `<think>`."""
    fork: ForkReason | None = None
    """Why it is a fork; None if it is not."""
    kept_thinking: bool = False
    """Whether the context keeps earlier reasoning that the template would drop (`history="keep"`)."""


class Prompt(msgspec.Struct, frozen=True):
    """What one model call sends, and where its turn will stand in the graph."""

    extension: Extension
    added: bytes
    """The ids of the extension, int32."""
    context: Context
    """All ids."""
    match: HistoryMatch | None
    """Where the request meets the recorded conversations; None for a call made of ids."""
    tools_key: bytes
    tools: bool
    """Whether the request has tools, so that the output may hold tool calls."""
    sent_after: int
    """How many turns were complete when the request was prepared."""
    sent_at: int
    """When the request was prepared, by the episode's clock of events."""
    messages: tuple[Message, ...] = ()
    """The messages that the request adds to the conversation of the extended turn."""
    schemas: ToolSchemas | None = None
    """The tools of the request, if it starts a conversation; the turn that it extends has the same tools."""
    started_s: float = 0.0
    """When the request was made, before it was rendered, seconds of `time.perf_counter`."""
