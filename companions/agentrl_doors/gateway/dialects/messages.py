"""Anthropic's Messages as a dialect: blocks in, blocks out.

Invariant: the content of an answer, whole or streamed, reads back as the recorded message (`message_blocks`), except for
reasoning where the call did not ask for thinking.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Final, cast

from agentrl.client.backend import Answer, Delta
from agentrl.tokens.parse import parse_json
from agentrl_doors.gateway.body import CallRefused
from agentrl_doors.gateway.dialect import Caller, DialectCall
from agentrl_doors.gateway.dialects.answers import Counts, Said, argument_text, call_id, frame, said
from agentrl_doors.gateway.dialects.callers import messages_caller
from agentrl_doors.gateway.dialects.message_blocks import UNPARSED, BlockReader, choice_arguments, tools_of_blocks
from agentrl_doors.gateway.fields import MAX_NESTING, Fields, argument_json, is_nested_deeper, read_object
from agentrl_doors.gateway.items import ItemStore

_SILENT: Final = frozenset({"metadata", "service_tier", "cache_control", "diagnostics", "inference_geo", "user_profile_id"})
_ERROR_TYPES: Final = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    529: "overloaded_error",
}
_INPUT_LEVELS: Final = MAX_NESTING - 5
"""Deepest nesting of an input, which comes back five levels below the top of a body."""
NO_THREADS: Final = "thread_unsupported_request"
"""The code after which clients send whole histories."""


class MessagesDialect:
    """`POST /v1/messages`, and `/v1/messages/count_tokens` with the same body.

    With `takes_prefill` a body may end with the beginning of its answer, which counts tokens and is never continued.
    """

    name = "messages"

    def __init__(self, *, takes_prefill: bool = False) -> None:
        self._takes_prefill = takes_prefill

    def read(self, body: bytes, store: ItemStore | None, *, omit_media: bool = False) -> DialectCall:
        """Return a body as a call."""
        sent = read_object(body)
        fields = Fields(sent)
        if fields.any("thread") is not None:
            raise CallRefused("thread is not served: histories are not kept here; send all messages", code=NO_THREADS)
        fields.skip(_SILENT)
        reader = BlockReader(omit_media=omit_media)
        reader.read_system(fields.any("system"))
        messages = reader.read(cast("list[object]", fields.need("messages", list)))
        if not messages:
            raise CallRefused("messages is empty; send at least one")
        if messages[-1]["role"] == "assistant" and not self._takes_prefill:
            raise CallRefused(
                "messages ends with the assistant: a given beginning of the answer (prefill) is not continued here; "
                "end with a message of the user"
            )
        arguments, ignored = _message_arguments(fields)
        return DialectCall(
            model=fields.read("model", str),
            messages=messages,
            arguments=arguments,
            stream=fields.read("stream", bool) or False,
            ignored=(*fields.unread, *ignored, *sorted(reader.ignored)),
            body=sent,
        )

    def caller(self, call: DialectCall, headers: Mapping[str, str]) -> Caller:
        """Return who makes a call."""
        return messages_caller(call, headers)

    def answer(self, call: DialectCall, answer: Answer) -> dict[str, object]:
        """Return a message."""
        parts = said(answer)
        return {
            **_empty_message(call, answer.id),
            "model": answer.model,
            "content": _answer_blocks(call, answer, parts),
            **_stop_fields(call, answer, parts),
            "usage": _block_usage(parts.counts),
        }

    def events(self, call: DialectCall, answer_id: str) -> MessageEvents:
        """Return the writer of a message's events."""
        return MessageEvents(call, answer_id)

    def keep(self, call: DialectCall, answer: Answer, store: ItemStore) -> None:
        """Keep nothing: calls name no earlier ones."""

    def answer_id(self, response_id: str) -> str:
        """Return the id of the answer that a message stands for."""
        return response_id.removeprefix("msg_")

    def refusal(self, message: str, *, status: int, code: str | None = None) -> dict[str, object]:
        """Return an error in Anthropic's shape, with the code in `details`."""
        kind = _ERROR_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
        error: dict[str, object] = {"type": kind, "message": _said_too_long(message, code)}
        if code is not None:
            error["details"] = {"error_code": code}
        return {"type": "error", "error": error}


def model_list(names: Sequence[str], *, since: int, max_input_tokens: int | None) -> dict[str, object]:
    """Return the list of models in Anthropic's shape; `since` is a time in seconds."""
    data = [model_entry(name, since=since, max_input_tokens=max_input_tokens) for name in names]
    ends = {"first_id": names[0] if names else None, "last_id": names[-1] if names else None}
    return {"data": data, "has_more": False, **ends}


def model_entry(name: str, *, since: int, max_input_tokens: int | None) -> dict[str, object]:
    """Return one model of that list."""
    created = datetime.fromtimestamp(since, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    limits = {"max_input_tokens": max_input_tokens, "max_tokens": max_input_tokens}
    return {"type": "model", "id": name, "display_name": name, "created_at": created, "lifecycle": "active", **limits}


def _said_too_long(message: str, code: str | None) -> str:
    """Return the message of an overflow in the words that clients look for."""
    if code != "context_length_exceeded":
        return message
    found = re.search(r"(\d+) tokens (?:leaves no room for output: the limit is|do not fit into) (\d+)", message)
    numbers = f"{found[1]} tokens > {found[2]} maximum" if found else message
    return f"prompt is too long: {numbers}"


def _message_arguments(fields: Fields) -> tuple[dict[str, object], list[str]]:
    """Return the arguments of chat completions that a body asks for, and the names that have no effect."""
    names = {"temperature": "temperature", "top_p": "top_p", "max_tokens": "max_tokens", "stop_sequences": "stop"}
    found = {ours: value for name, ours in names.items() if (value := fields.any(name)) not in (None, [])}
    if (top_k := fields.any("top_k")) is not None:
        found["extra_body"] = {"top_k": top_k}
    tools, ignored_tools = tools_of_blocks(cast("list[object]", fields.read("tools", list) or []))
    ignored = sorted(ignored_tools)
    if tools:
        found["tools"] = tools
    choice = fields.read("tool_choice", dict)
    if choice is not None:
        found |= choice_arguments(cast("Mapping[str, object]", choice))
    output = Fields(fields.any("output_config") or {}, "output_config")
    form = output.read("format", dict) or fields.read("output_format", dict)
    ignored += output.unread
    if form is not None:
        schema = Fields(form, "output_config.format")
        if schema.need("type", str) != "json_schema":
            raise CallRefused(f"output_config.format.type must be json_schema, got {schema.need('type', str)!r:.80}")
        inner = {"name": "output", "schema": schema.need("schema", dict)}
        found["response_format"] = {"type": "json_schema", "json_schema": inner}
    thinking = Fields(fields.any("thinking") or {}, "thinking")
    thinking.skip(("type", "display"))
    return found, [*ignored, *thinking.unread]


def _shows_thinking(call: DialectCall) -> bool:
    """Return whether a call asks for thinking; clients that do not may expect text as the first block."""
    thinking = call.body.get("thinking")
    return isinstance(thinking, Mapping) and cast("Mapping[str, object]", thinking).get("type") != "disabled"


def _empty_message(call: DialectCall, answer_id: str) -> dict[str, object]:
    """Return a message without content."""
    return {
        "id": f"msg_{answer_id}",
        "type": "message",
        "role": "assistant",
        "model": call.model or "policy",
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": _block_usage(Counts(0, 0, 0)),
    }


def _answer_blocks(call: DialectCall, answer: Answer, parts: Said) -> list[dict[str, object]]:
    blocks: list[dict[str, object]] = []
    if parts.reasoning and _shows_thinking(call):
        blocks.append({"type": "thinking", "thinking": parts.reasoning, "signature": signature(parts.reasoning)})
    if parts.content:
        blocks.append({"type": "text", "text": parts.content})
    for index, each in enumerate(parts.calls):
        arguments = argument_text(each)
        value = parse_json(arguments)
        if not isinstance(value, dict) or not _comes_back(cast("object", value)):
            value = {UNPARSED: {"raw": arguments, "len": len(arguments)}}
        blocks.append({"type": "tool_use", "id": call_id(answer, index, each), "name": each.name, "input": value})
    return blocks


def _comes_back(value: object) -> bool:
    """Return whether an input can be sent back: a body holds no half of a surrogate pair and is not nested too deeply."""
    if is_nested_deeper(value, _INPUT_LEVELS):
        return False
    try:
        argument_json(value).encode()
    except UnicodeEncodeError:
        return False
    return True


def _stop_fields(call: DialectCall, answer: Answer, parts: Said) -> dict[str, object]:
    """Return the reason of an answer's end."""
    reason = "max_tokens" if parts.truncated else "tool_use" if parts.calls else "end_turn"
    matched, stops = answer.generation.matched_stop, call.arguments.get("stop")
    if reason == "end_turn" and isinstance(matched, str) and isinstance(stops, list) and matched in stops:
        return {"stop_reason": "stop_sequence", "stop_sequence": matched}
    return {"stop_reason": reason, "stop_sequence": None}


def _block_usage(counts: Counts) -> dict[str, object]:
    return {
        "input_tokens": counts.prompt - counts.cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": counts.cached,
        "output_tokens": counts.sampled,
    }


def signature(thinking: str) -> str:
    """Return the signature of thinking, which clients carry and no server checks: changed thinking is the client's edit."""
    return hashlib.blake2b(thinking.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


class MessageEvents:
    """Writes one message as events: blocks one after another, each call whole."""

    def __init__(self, call: DialectCall, answer_id: str) -> None:
        self._call, self._answer_id = call, answer_id
        self._thinks = _shows_thinking(call)
        self._open: str | None = None
        self._index = 0
        self._text = {"thinking": "", "text": ""}

    def begin(self) -> Sequence[bytes]:
        """Return the start of the message, and a ping."""
        return [_message_event("message_start", message=_empty_message(self._call, self._answer_id)), _message_event("ping")]

    def push(self, delta: Delta) -> Sequence[bytes]:
        """Return the events of new text."""
        frames: list[bytes] = []
        if delta.reasoning and self._thinks and self._open != "text":
            frames += self._grow("thinking", delta.reasoning)
        if delta.content:
            frames += self._grow("text", delta.content)
        return frames

    def finish(self, answer: Answer) -> Sequence[bytes]:
        """Return the rest of the text, the calls, and the end of the message."""
        parts, frames = said(answer), list[bytes]()
        if self._open != "text" and self._thinks:
            frames += self._grow("thinking", parts.reasoning[len(self._text["thinking"]) :])
        frames += self._grow("text", parts.content[len(self._text["text"]) :])
        frames += self._close()
        for index, each in enumerate(parts.calls):
            opened = {"type": "tool_use", "id": call_id(answer, index, each), "name": each.name, "input": {}}
            frames.append(_message_event("content_block_start", index=self._index, content_block=opened))
            frames.append(self._delta("input_json_delta", "partial_json", argument_text(each)))
            frames += self._stop()
        end = _message_event(
            "message_delta", delta=_stop_fields(self._call, answer, parts), usage=_block_usage(parts.counts)
        )
        return [*frames, end, _message_event("message_stop")]

    def sign(self) -> bytes:
        """Return a ping."""
        return _message_event("ping")

    def fail(self, message: str, *, status: int, code: str | None = None) -> Sequence[bytes]:
        """Return the event of an error."""
        return [frame(MessagesDialect().refusal(message, status=status, code=code), "error")]

    def _grow(self, kind: str, new: str) -> list[bytes]:
        if not new:
            return []
        frames: list[bytes] = []
        if self._open != kind:
            frames += self._close()
            self._open = kind
            opened = {"type": kind, kind: ""} | ({"signature": ""} if kind == "thinking" else {})
            frames.append(_message_event("content_block_start", index=self._index, content_block=opened))
        self._text[kind] += new
        frames.append(self._delta(f"{kind}_delta", kind, new))
        return frames

    def _close(self) -> list[bytes]:
        if self._open is None:
            return []
        frames: list[bytes] = []
        if self._open == "thinking":
            frames.append(self._delta("signature_delta", "signature", signature(self._text["thinking"])))
        self._open = None
        return [*frames, *self._stop()]

    def _stop(self) -> list[bytes]:
        self._index += 1
        return [_message_event("content_block_stop", index=self._index - 1)]

    def _delta(self, kind: str, name: str, text: str) -> bytes:
        return _message_event("content_block_delta", index=self._index, delta={"type": kind, name: text})


def _message_event(kind: str, **fields: object) -> bytes:
    return frame({"type": kind, **fields}, kind)
