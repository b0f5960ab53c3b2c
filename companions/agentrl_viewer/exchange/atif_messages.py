"""Chat messages as steps of ATIF, and back.

Invariant: the messages that are read from steps are those that were written, field by field. Where the fields of the format
do not say all that a message says, the message itself stands in `extra`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, Literal, TypeAlias, cast

import msgspec

from agentrl_viewer.exchange.atif_format import (
    OURS,
    AtifContent,
    AtifObservation,
    AtifPart,
    AtifResult,
    AtifSource,
    AtifStep,
    AtifToolCall,
    Extra,
    ours,
)

WireMessage: TypeAlias = dict[str, Any]
_SOURCES: Final[Mapping[str, Literal["system", "user", "agent"]]] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "agent",
}
_IMAGE = re.compile(r"data:(image/(?:jpeg|png|gif|webp))[;,]|.*\.(jpe?g|png|gif|webp)(?:[?#].*)?$", re.IGNORECASE)
_ARGUMENTS = "arguments"
_MESSAGE = "message"


def add_message(steps: list[AtifStep], message: WireMessage) -> None:
    """Add a message of the context: the result of a tool to the step that called it, any other as a step."""
    last = steps[-1] if steps else None
    if message.get("role") == "tool" and last is not None and last.source == "agent":
        observed = last.observation or AtifObservation([])
        last.observation = AtifObservation([*observed.results, _result_of(message, last.tool_calls or [])])
        return
    step = step_of(message, len(steps) + 1)
    if step.source == "agent":
        step.is_copied_context = True  # no call of this episode sampled it
    steps.append(step)


def step_of(message: WireMessage, step_id: int) -> AtifStep:
    """Return the step of one message."""
    source = _SOURCES.get(str(message.get("role")), "user")
    step = AtifStep(step_id=step_id, source=source, message=_content_of(message.get("content")))
    if source == "agent":
        reasoning, calls = message.get("reasoning_content"), message.get("tool_calls")
        step.reasoning_content = reasoning if isinstance(reasoning, str) and reasoning else None
        if isinstance(calls, list) and calls:
            step.tool_calls = [_call_of(call) for call in cast("list[object]", calls)]
    if _message_from(step) != message:
        step.extra = {OURS: {_MESSAGE: message}}
    return step


def messages_of(step: AtifStep, path_of: Callable[[AtifResult], str]) -> Iterator[WireMessage]:
    """Yield the message of a step, and what was answered to it; `path_of` writes a result that has no content."""
    kept = ours(step.extra).get(_MESSAGE)
    yield dict(kept) if isinstance(kept, dict) else _message_from(step)
    for result in step.observation.results if step.observation else ():
        kept = ours(result.extra).get(_MESSAGE)
        yield dict(kept) if isinstance(kept, dict) else _tool_message_from(result, path_of)


def _message_from(step: AtifStep) -> WireMessage:
    content = _content_from(step.message)
    if step.source != "agent":
        return {"role": step.source, "content": content}
    found: WireMessage = {"role": "assistant", "content": content}
    if step.reasoning_content is not None:
        found["reasoning_content"] = step.reasoning_content
    if step.tool_calls:
        found["content"] = content or None
        found["tool_calls"] = [_call_from(call) for call in step.tool_calls]
    return found


def _result_of(message: WireMessage, calls: Sequence[AtifToolCall]) -> AtifResult:
    identity = message.get("tool_call_id")
    is_answer = isinstance(identity, str) and identity in {call.tool_call_id for call in calls}
    result = AtifResult(source_call_id=identity if is_answer else None, content=_content_of(message.get("content")))
    if _tool_message_from(result, lambda _: "") != message:
        result.extra = {OURS: {_MESSAGE: message}}
    return result


def _tool_message_from(result: AtifResult, path_of: Callable[[AtifResult], str]) -> WireMessage:
    content = path_of(result) if result.content is None else _content_from(result.content)
    if result.source_call_id is None:
        return {"role": "user", "content": content}  # what a terminal printed, to an agent that calls no tools
    return {"role": "tool", "tool_call_id": result.source_call_id, "content": content}


def _call_of(call: object) -> AtifToolCall:
    fields = cast("Mapping[str, object]", call) if isinstance(call, Mapping) else {}
    function = fields.get("function")
    named = cast("Mapping[str, object]", function) if isinstance(function, Mapping) else {}
    given = named.get(_ARGUMENTS)
    found = AtifToolCall(str(fields.get("id", "")), str(named.get("name", "")), _arguments_object(given))
    if isinstance(given, str) and _json_text(found.arguments) != given:
        found.extra = {OURS: {_ARGUMENTS: given}}  # as the model wrote it: other spaces, or no JSON object at all
    return found


def _call_from(call: AtifToolCall) -> WireMessage:
    written = ours(call.extra).get(_ARGUMENTS)
    arguments = written if isinstance(written, str) else _json_text(call.arguments)
    return {"id": call.tool_call_id, "type": "function", "function": {"name": call.function_name, _ARGUMENTS: arguments}}


def _arguments_object(text: object) -> dict[str, Any]:
    try:
        found: object = json.loads(text) if isinstance(text, str) else text
    except (ValueError, RecursionError):
        found = None
    return cast("dict[str, Any]", found) if isinstance(found, dict) and _is_plain(found) else {}


def _is_plain(value: object) -> bool:
    """Return whether every JSON reader takes the value: no NaN, no number of more than 64 bits, no half of a character."""
    try:
        json.dumps(value, allow_nan=False)
        msgspec.json.encode(value)
    except (ValueError, OverflowError, RecursionError):
        return False
    return True


def _json_text(arguments: Extra) -> str:
    return json.dumps(arguments, ensure_ascii=False)


def _content_of(content: object) -> AtifContent:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return "" if content is None else json.dumps(content, ensure_ascii=False)
    return [_part_of(part) for part in cast("list[object]", content)]


def _part_of(part: object) -> AtifPart:
    fields = cast("Mapping[str, Any]", part) if isinstance(part, Mapping) else {"type": "text", "text": str(part)}
    image = fields.get("image_url")
    url = cast("Mapping[str, object]", image).get("url") if isinstance(image, Mapping) else None
    if isinstance(url, str) and (found := _IMAGE.match(url)):
        kind = found[1] or f"image/{found[2].lower().replace('jpg', 'jpeg')}"
        return AtifPart("image", source=AtifSource(kind, url))
    text = fields.get("text")
    return AtifPart("text", text=text if isinstance(text, str) else f"[{fields.get('type', 'part')}]")


def _content_from(content: AtifContent) -> str | list[WireMessage]:
    return content if isinstance(content, str) else [_part_from(part) for part in content]


def _part_from(part: AtifPart) -> WireMessage:
    if part.source is None:
        return {"type": "text", "text": part.text or ""}
    if part.type == "image":
        return {"type": "image_url", "image_url": {"url": part.source.path}}
    return {"type": "text", "text": f"[{part.type}: {part.source.path}]"}
