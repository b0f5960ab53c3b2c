"""Anthropic's messages as they are written: their blocks, their events, and errors.

Invariant: a message has the same blocks, whole or streamed, and each call is sent whole.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import Final, cast

from agentrl.client.backend import Answer, Delta
from agentrl.tokens.parse import parse_json
from agentrl_doors.gateway.dialect import DialectCall
from agentrl_doors.gateway.dialects.answers import Counts, Said, argument_text, call_id, frame, said
from agentrl_doors.gateway.dialects.messages.reading import UNPARSED
from agentrl_doors.gateway.fields import MAX_NESTING, argument_json, is_nested_deeper

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


def message_error(message: str, *, status: int, code: str | None = None) -> dict[str, object]:
    """Return an error in Anthropic's shape, with the code in `details`."""
    kind = _ERROR_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    error: dict[str, object] = {"type": kind, "message": _said_too_long(message, code)}
    if code is not None:
        error["details"] = {"error_code": code}
    return {"type": "error", "error": error}


def _said_too_long(message: str, code: str | None) -> str:
    """Return the message of an overflow in the words that clients look for."""
    if code != "context_length_exceeded":
        return message
    found = re.search(r"(\d+) tokens (?:leaves no room for output: the limit is|do not fit into) (\d+)", message)
    numbers = f"{found[1]} tokens > {found[2]} maximum" if found else message
    return f"prompt is too long: {numbers}"


def answer_message(call: DialectCall, answer: Answer) -> dict[str, object]:
    """Return an answer as a message."""
    parts = said(answer)
    return {
        **_empty_message(call, answer.id),
        "model": answer.model,
        "content": _answer_blocks(call, answer, parts),
        **_stop_fields(call, answer, parts),
        "usage": _block_usage(parts.counts),
    }


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
        return [frame(message_error(message, status=status, code=code), "error")]

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
