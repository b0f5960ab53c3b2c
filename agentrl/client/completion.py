"""Turns as openai objects: `ChatCompletion` and `ChatCompletionChunk`.

Invariant: what is returned passes the openai models' own validation; the content, reasoning and tool calls are those of
the turn's recorded message.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, TypeVar

from openai import BaseModel
from openai.types import CompletionUsage
from openai.types.chat import ChatCompletion, ChatCompletionChunk, ChatCompletionMessage
from openai.types.chat.chat_completion import Choice, ChoiceLogprobs

from agentrl.inference.backend import Generation
from agentrl.tokens.renderer import Renderer
from agentrl.types import Int32Array, Message, StopReason

_Model = TypeVar("_Model", bound=BaseModel)
_LENGTH = StopReason.LENGTH  # asking an enum for its member takes longer than comparing
_DEFAULTS: dict[type[BaseModel], dict[str, object]] = {
    kind: {name: field.get_default(call_default_factory=True) for name, field in kind.model_fields.items()}
    for kind in (ChatCompletion, Choice, ChatCompletionMessage, CompletionUsage)
}


class _Open(BaseModel):
    """An openai model before it is made: what its attributes are set to is not looked at."""

    __init__ = object.__init__  # pyright: ignore[reportAssignmentType] - of no fields
    __setattr__ = object.__setattr__
    __delattr__ = object.__delattr__


def chunk_header(identity: str, model: str) -> dict[str, object]:
    """Return what all chunks of one call say of it, stamped with the present time."""
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
    said = message if len(message) == 2 and message["content"] else message_fields(message)
    counts = usage(prompt_tokens, generation)
    choice: dict[str, object] = {
        "finish_reason": finish_reason(message, generation),
        "index": 0,
        "message": _made(ChatCompletionMessage, said, {}) if len(said) == 2 else ChatCompletionMessage.model_validate(said),
    }
    if logprobs is not None:
        choice["logprobs"] = ChoiceLogprobs.model_validate(logprobs)
    fields: dict[str, object] = {
        "id": identity,
        "object": "chat.completion",
        "created": int(time.time()),
        "model": model,
        "choices": [_made(Choice, choice, {"token_ids": generation.output_ids.tolist()})],
        "usage": _made(CompletionUsage, counts, {}) if len(counts) == 3 else CompletionUsage.model_validate(counts),
    }
    return _made(ChatCompletion, fields, {} if prompt_ids is None else {"prompt_token_ids": prompt_ids.tolist()})


def _made(kind: type[_Model], fields: Mapping[str, object], extra: dict[str, object]) -> _Model:
    """Return what validating these fields would return; for text, numbers and models, which are valid as they are."""
    made: Any = _Open()
    made.__dict__ = {**_DEFAULTS[kind], **fields}
    made.__pydantic_fields_set__ = {*fields, *extra}
    made.__pydantic_extra__ = extra
    made.__pydantic_private__ = None
    made.__class__ = kind
    return made


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
    if generation.stop_reason is _LENGTH:
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
