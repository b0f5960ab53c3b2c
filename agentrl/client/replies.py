"""Turns as openai objects: `ChatCompletion` and `ChatCompletionChunk`.

Invariant: what is returned passes the openai models' own validation; the content, reasoning and tool calls are those of
the turn's recorded message.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

from openai.types.chat import ChatCompletion, ChatCompletionChunk

from agentrl.inference.base import Generation
from agentrl.tokens.renderer import Renderer
from agentrl.types import Int32Array, Message, StopReason


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyHeader:
    """What all chunks and the completion of one call have in common."""

    id: str
    model: str
    created: int


def reply_header(identity: str, model: str) -> ReplyHeader:
    """Return a header stamped with the present time."""
    return ReplyHeader(id=identity, model=model, created=int(time.time()))


def completion(
    header: ReplyHeader,
    message: Message,
    generation: Generation,
    *,
    prompt_tokens: int,
    logprobs: Mapping[str, object] | None = None,
    prompt_ids: Int32Array | None = None,
) -> ChatCompletion:
    """Return the completion of a turn.

    Beyond the OpenAI fields it carries `choices[0].token_ids` (the sampled ids), `message.reasoning_content` where the
    model reasoned, and `prompt_token_ids` where they were asked for.
    """
    choice: dict[str, object] = {
        "index": 0,
        "finish_reason": finish_reason(message, generation),
        "message": message_fields(message),
        "token_ids": generation.output_ids.tolist(),
    }
    if logprobs is not None:
        choice["logprobs"] = logprobs
    fields: dict[str, object] = {
        "id": header.id,
        "object": "chat.completion",
        "created": header.created,
        "model": header.model,
        "choices": [choice],
        "usage": usage(prompt_tokens, generation),
    }
    if prompt_ids is not None:
        fields["prompt_token_ids"] = prompt_ids.tolist()
    return ChatCompletion.model_validate(fields)


def chunk(
    header: ReplyHeader,
    delta: Mapping[str, object] | None,
    *,
    finish: str | None = None,
    usage: Mapping[str, object] | None = None,
    extra: Mapping[str, object] | None = None,
) -> ChatCompletionChunk:
    """Return a chunk with one choice, which has `extra`, too; or with none when `delta` is None."""
    fields: dict[str, object] = {
        "id": header.id,
        "object": "chat.completion.chunk",
        "created": header.created,
        "model": header.model,
        "choices": [] if delta is None else [{"index": 0, "delta": delta, "finish_reason": finish, **(extra or {})}],
    }
    if usage is not None:
        fields["usage"] = usage
    return ChatCompletionChunk.model_validate(fields)


def message_fields(message: Message) -> dict[str, object]:
    """Return a recorded message as the wire writes it: content None beside tool calls when there is no text."""
    content, calls, reasoning = message.get("content"), message.get("tool_calls"), message.get("reasoning_content")
    fields: dict[str, object] = {"role": "assistant", "content": content or (None if calls else "")}
    if reasoning:
        fields["reasoning_content"] = reasoning
    if calls:
        fields["tool_calls"] = calls
    return fields


def finish_reason(message: Message, generation: Generation) -> str:
    """Return `length` for a truncated output, else `tool_calls` if there are any, else `stop`."""
    if generation.stop_reason is StopReason.LENGTH:
        return "length"
    return "tool_calls" if message.get("tool_calls") else "stop"


def usage(prompt_tokens: int, generation: Generation) -> dict[str, object]:
    """Return the token counts of a call."""
    sampled = len(generation.output_ids)
    counts: dict[str, object] = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": sampled,
        "total_tokens": prompt_tokens + sampled,
    }
    if generation.cached_tokens:
        counts["prompt_tokens_details"] = {"cached_tokens": generation.cached_tokens}
    return counts


def token_logprobs(renderer: Renderer, generation: Generation) -> dict[str, object]:
    """Return one entry for each sampled token; `bytes` is None where a token is not whole UTF-8 by itself."""
    entries: list[dict[str, object]] = []
    for token_id, logprob in zip(generation.output_ids.tolist(), generation.output_logprobs.tolist(), strict=True):
        text = renderer.decode([token_id], skip_special=False)
        data = None if "\ufffd" in text else list(text.encode())
        entries.append({"token": text, "bytes": data, "logprob": logprob, "top_logprobs": [], "token_id": token_id})
    return {"content": entries, "refusal": None}
