"""Turns as openai objects: `ChatCompletion` and `ChatCompletionChunk`.

Invariant: each object has passed the validation of its openai model; its content, reasoning and tool calls are those of
the turn's recorded message.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from openai.types.chat import ChatCompletion, ChatCompletionChunk

from agentrl.inference.backend import Generation
from agentrl.tokens.renderer import Renderer
from agentrl.types import Int32Array, Message, StopReason


def chunk_header(identity: str, model: str) -> dict[str, object]:
    """Return the fields that all chunks of one call have in common, with the present time."""
    return {"id": identity, "object": "chat.completion.chunk", "created": int(time.time()), "model": model}


def completion(
    identity: str,
    model: str,
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
        "finish_reason": finish_reason(message, generation),
        "index": 0,
        "message": message_fields(message),
        "token_ids": generation.output_ids.tolist(),
    }
    if logprobs is not None:
        choice["logprobs"] = logprobs
    fields: dict[str, object] = {
        "id": identity,
        "object": "chat.completion",
        "created": int(time.time()),
        "model": model,
        "choices": [choice],
        "usage": usage(prompt_tokens, generation),
    }
    if prompt_ids is not None:
        fields["prompt_token_ids"] = prompt_ids.tolist()
    return ChatCompletion.model_validate(fields)


def chunk(
    header: Mapping[str, object],
    delta: Mapping[str, object] | None,
    *,
    finish: str | None = None,
    usage: Mapping[str, object] | None = None,
    extra: Mapping[str, object] | None = None,
) -> ChatCompletionChunk:
    """Return a chunk with one choice, which has `extra`, too; or with none when `delta` is None."""
    choice = {"index": 0, "delta": delta, "finish_reason": finish, **(extra or {})}
    fields: dict[str, object] = {**header, "choices": [] if delta is None else [choice]}
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
