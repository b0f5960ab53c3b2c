"""An answer as the dialects write it: text, reasoning, calls, its end, and its counts; from a record or from an endpoint.

Invariant: it holds what the recorded message holds, whichever backend answered.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from openai.types.chat import ChatCompletion, ChatCompletionChunk

from agentrl.client.backend import Answer, Delta
from agentrl.servers.http.errors import json_bytes, openai_error
from agentrl.tokens.messages import ToolCallFields, calls_of, text_of
from agentrl.types import StopReason

COMMENT: Final = b": the call runs\n\n"
"""The sign of life that each reader of events passes over."""
DONE: Final = b"data: [DONE]\n\n"
"""The end of a stream of OpenAI's chunks."""
_REASONING_NAMES = ("reasoning_content", "reasoning")


class Counts(NamedTuple):
    """Token counts of a call."""

    prompt: int
    sampled: int
    cached: int
    """Those of the prompt that were not computed again."""


class Said(NamedTuple):
    """The parts of an answer."""

    reasoning: str
    content: str
    calls: Sequence[ToolCallFields]
    truncated: bool
    counts: Counts


def said(answer: Answer) -> Said:
    """Return the parts of an answer."""
    message = answer.message
    found = (message.get(name) for name in _REASONING_NAMES)
    return Said(
        reasoning=next((text for text in found if isinstance(text, str) and text), ""),
        content=text_of(message.get("content"), "assistant message"),
        calls=calls_of(message),
        truncated=answer.generation.stop_reason is StopReason.LENGTH,
        counts=answer_counts(answer),
    )


def answer_counts(answer: Answer) -> Counts:
    """Return the token counts of an answer; an endpoint's own, where it answered."""
    generation = answer.generation
    if answer.native is None:
        return Counts(answer.num_context, len(generation.output_ids), generation.cached_tokens or 0)
    return _native_counts(answer.native)


def _native_counts(native: ChatCompletion) -> Counts:
    usage = native.usage
    if usage is None:
        return Counts(0, 0, 0)
    details = usage.prompt_tokens_details
    return Counts(usage.prompt_tokens or 0, usage.completion_tokens or 0, (details and details.cached_tokens) or 0)


def argument_text(call: ToolCallFields) -> str:
    """Return the arguments of a call as text."""
    return call.arguments if isinstance(call.arguments, str) else json_bytes(call.arguments).decode()


def call_id(answer: Answer, index: int, call: ToolCallFields) -> str:
    """Return the id of a call; one is made where an endpoint gives none."""
    return call.id or "call_" + hashlib.blake2b(f"{answer.id}/{index}".encode(), digest_size=9).hexdigest()


def delta_of(chunk: ChatCompletionChunk) -> Delta:
    """Return the new text of an endpoint's chunk; its tool calls come whole with the `Answer`."""
    reasoning = content = ""
    for choice in chunk.choices[:1]:
        found = (getattr(choice.delta, name, None) for name in _REASONING_NAMES)
        reasoning = next((text for text in found if isinstance(text, str) and text), "")
        content = choice.delta.content or ""
    return Delta(reasoning, content)


def frame(value: Mapping[str, object], event: str | None = None) -> bytes:
    r"""Return one server-sent event.

    Example:
        >>> frame({"type": "ping"}, "ping")
        b'event: ping\ndata: {"type":"ping"}\n\n'
    """
    named = b"" if event is None else b"event: " + event.encode() + b"\n"
    return named + b"data: " + json_bytes(value) + b"\n\n"


class ChunkSigns:
    """The sign of life and the error of a stream of OpenAI's chunks."""

    def sign(self) -> bytes:
        """Return a comment."""
        return COMMENT

    def fail(self, message: str, *, status: int, code: str | None = None) -> Sequence[bytes]:
        """Return an event with the error."""
        return [frame(openai_error(message, status=status, code=code))]


def created_now() -> int:
    """Return the time as bodies write it."""
    return int(time.time())
