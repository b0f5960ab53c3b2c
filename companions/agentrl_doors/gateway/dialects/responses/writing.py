"""Responses as they are written: their items, the object around them, and their events.

Invariant: ids come from the answer's id, so an answer gets the same items whether it is streamed or not.
`response.completed` holds the items that `response.output_item.done` sent before it, and the deltas of an item add up to its
text. A call is sent when it is whole: clients run tools before the stream has ended.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, cast

from agentrl.client.backend import Answer, Delta
from agentrl.tokens.messages import ToolCallFields
from agentrl_doors.gateway.dialect import DialectCall
from agentrl_doors.gateway.dialects.answers import COMMENT, Counts, argument_text, call_id, created_now, frame, said
from agentrl_doors.gateway.dialects.responses.reading import ToolName, custom_input, read_tools, sealed

_ECHOED: Final = ("instructions", "max_output_tokens", "max_tool_calls", "previous_response_id", "prompt_cache_key")
_ECHOED_OR: Final[Mapping[str, object]] = {
    "metadata": {},
    "parallel_tool_calls": True,
    "temperature": None,
    "top_p": None,
    "tool_choice": "auto",
    "tools": [],
    "reasoning": None,
    "text": {"format": {"type": "text"}},
    "truncation": "disabled",
    "store": True,
}


def response_id(answer_id: str) -> str:
    """Return the id of the response that an answer is."""
    return f"resp_{answer_id}"


def response_body(call: DialectCall, identity: str, *, created: int) -> dict[str, object]:
    """Return a response that has no output yet."""
    body = call.body
    return {
        "id": identity,
        "object": "response",
        "created_at": created,
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "model": call.model or "policy",
        "output": [],
        "usage": None,
        **{name: body.get(name) for name in _ECHOED},
        **{name: default if body.get(name) is None else body[name] for name, default in _ECHOED_OR.items()},
    }


def ended(body: Mapping[str, object], answer: Answer, output: Sequence[Mapping[str, object]]) -> dict[str, object]:
    """Return a response with its output: completed, or incomplete where the limit of tokens cut it."""
    parts = said(answer)
    status = "incomplete" if parts.truncated else "completed"
    details = {"reason": "max_output_tokens"} if parts.truncated else None
    return {
        **body,
        "model": answer.model,
        "status": status,
        "incomplete_details": details,
        "output": output,
        "usage": _response_usage(parts.counts),
    }


def _response_usage(counts: Counts) -> dict[str, object]:
    return {
        "input_tokens": counts.prompt,
        "input_tokens_details": {"cached_tokens": counts.cached, "cache_write_tokens": 0},
        "output_tokens": counts.sampled,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": counts.prompt + counts.sampled,
    }


def wants_summary(call: DialectCall) -> bool:
    """Return whether a call asks for reasoning as a summary; else it is content."""
    reasoning = call.body.get("reasoning")
    fields = cast("Mapping[str, object]", reasoning) if isinstance(reasoning, Mapping) else {}
    return any(fields.get(name) not in (None, "none") for name in ("summary", "generate_summary"))


def output_items(call: DialectCall, answer: Answer, answer_id: str) -> list[dict[str, object]]:
    """Return the items of an answer; an answer without text, reasoning and calls has an empty message."""
    parts = said(answer)
    items: list[dict[str, object]] = []
    if parts.reasoning:
        items.append(reasoning_item(call, answer_id, parts.reasoning))
    if parts.content or (not items and not parts.calls):
        items.append(message_item(answer_id, parts.content, truncated=parts.truncated, logprobs=text_logprobs(answer)))
    names = read_tools(call.body.get("tools")).names if parts.calls else {}
    for index, tool_call in enumerate(parts.calls):
        items.append(_call_item(answer_id, index, tool_call, call_id(answer, index, tool_call), names))
    return items


def reasoning_item(call: DialectCall, answer_id: str, text: str) -> dict[str, object]:
    """Return the item of reasoning; its encrypted form is there where the call includes it."""
    item: dict[str, object] = {"type": "reasoning", "id": f"rs_{answer_id}", "summary": [], "status": "completed"}
    if wants_summary(call):
        item["summary"] = [{"type": "summary_text", "text": text}]
    else:
        item["content"] = [{"type": "reasoning_text", "text": text}]
    included = call.body.get("include")
    if isinstance(included, list) and "reasoning.encrypted_content" in included:
        item["encrypted_content"] = sealed(text)
    return item


def message_item(
    answer_id: str, text: str, *, truncated: bool, logprobs: Sequence[Mapping[str, object]] = ()
) -> dict[str, object]:
    """Return the item of text."""
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}
    status = "incomplete" if truncated else "completed"
    return {"type": "message", "id": f"msg_{answer_id}", "role": "assistant", "status": status, "content": [part]}


def text_logprobs(answer: Answer) -> list[dict[str, object]]:
    """Return the log-probs of all sampled tokens; none where the call does not ask for them."""
    entries = cast("list[dict[str, object]]", (answer.logprobs or {}).get("content") or [])
    shown = ("token", "bytes", "logprob", "top_logprobs")
    return [{name: entry.get(name) or ([] if name == "bytes" else entry.get(name)) for name in shown} for entry in entries]


def _call_item(
    answer_id: str, index: int, call: ToolCallFields, identity: str, names: Mapping[str, ToolName]
) -> dict[str, object]:
    tool, arguments = names.get(call.name, ToolName(call.name)), argument_text(call)
    item: dict[str, object] = {"call_id": identity, "name": tool.name}
    if tool.namespace is not None:
        item["namespace"] = tool.namespace
    if tool.custom:
        return {"type": "custom_tool_call", "id": f"ctc_{answer_id}_{index}", **item, "input": custom_input(arguments)}
    named = {"type": "function_call", "id": f"fc_{answer_id}_{index}", "status": "completed"}
    return {**named, **item, "arguments": arguments}


class ResponseEvents:
    """Writes one response as events."""

    def __init__(self, call: DialectCall, answer_id: str) -> None:
        self._call, self._answer_id = call, answer_id
        self._body = response_body(call, response_id(answer_id), created=created_now())
        self._number = 0
        self._reasoning = _TextItem("summary" if wants_summary(call) else "reasoning", f"rs_{answer_id}")
        self._text = _TextItem("output", f"msg_{answer_id}")
        self._items: list[dict[str, object]] = []
        """The items that are done."""

    def begin(self) -> Sequence[bytes]:
        """Return the events that a response exists."""
        return [self._event(f"response.{name}", response=self._body) for name in ("created", "in_progress")]

    def push(self, delta: Delta) -> Sequence[bytes]:
        """Return the events of new text."""
        frames: list[bytes] = []
        if delta.reasoning and not self._text.is_open:
            frames += self._grow(self._reasoning, delta.reasoning)
        if delta.content:
            frames += self._close_reasoning()
            frames += self._grow(self._text, delta.content)
        return frames

    def finish(self, answer: Answer) -> Sequence[bytes]:
        """Return the rest of the text, the calls, and the whole response."""
        parts, frames = said(answer), list[bytes]()
        if not self._text.is_open:
            frames += self._grow(self._reasoning, parts.reasoning[len(self._reasoning.text) :])
        frames += self._close_reasoning()
        wanted = output_items(self._call, answer, self._answer_id)
        for item in wanted:
            if item["type"] == "message":
                rest = parts.content[len(self._text.text) :]
                frames += self._grow(self._text, rest, even_empty=True)
                done = message_item(
                    self._answer_id, self._text.text, truncated=parts.truncated, logprobs=text_logprobs(answer)
                )
                frames += self._close(self._text, done)
            elif item["type"] != "reasoning":
                frames += self._call_events(item)
        response = ended(self._body, answer, self._items)
        return [*frames, self._event(f"response.{response['status']}", response=response)]

    def sign(self) -> bytes:
        """Return a comment."""
        return COMMENT

    def fail(self, message: str, *, status: int, code: str | None = None) -> Sequence[bytes]:
        """Return the event of a response that has failed."""
        known = code or ("server_error" if status >= 500 else "rate_limit_exceeded" if status == 429 else "invalid_prompt")
        failed = {**self._body, "status": "failed", "error": {"code": known, "message": message}, "output": self._items}
        return [self._event("response.failed", response=failed)]

    def _grow(self, item: _TextItem, new: str, *, even_empty: bool = False) -> list[bytes]:
        """Return the events of new text of an item, and those that open it."""
        frames: list[bytes] = []
        if not item.is_open and (new or even_empty):
            item.index, item.is_open = len(self._items), True
            frames.append(self._event("response.output_item.added", output_index=item.index, item=self._opened(item)))
            frames.append(self._part(item, "added", ""))
        if new:
            item.text += new
            frames.append(self._event(f"response.{item.kind.text}.delta", **item.place, delta=new, **item.kind.extra))
        return frames

    def _close_reasoning(self) -> list[bytes]:
        item = self._reasoning
        if not item.is_open:
            return []
        return self._close(item, reasoning_item(self._call, self._answer_id, item.text))

    def _close(self, item: _TextItem, done: dict[str, object]) -> list[bytes]:
        item.is_open = False
        self._items.append(done)
        return [
            self._event(f"response.{item.kind.text}.done", **item.place, text=item.text, **item.kind.extra),
            self._part(item, "done", item.text),
            self._event("response.output_item.done", output_index=item.index, item=done),
        ]

    def _opened(self, item: _TextItem) -> dict[str, object]:
        if item is self._text:
            opened = message_item(self._answer_id, "", truncated=False)
            return {**opened, "status": "in_progress", "content": []}
        return {"type": "reasoning", "id": item.id, "summary": [], "status": "in_progress"}

    def _part(self, item: _TextItem, what: str, text: str) -> bytes:
        part: dict[str, object] = {"type": item.kind.part, "text": text}
        if item is self._text:
            part |= {"annotations": [], "logprobs": []}
        return self._event(f"response.{item.kind.container}.{what}", **item.place, part=part)

    def _call_events(self, item: dict[str, object]) -> list[bytes]:
        index = len(self._items)
        self._items.append(item)
        name, what = ("input", "custom_tool_call_input")
        if item["type"] == "function_call":
            name, what = ("arguments", "function_call_arguments")
        text = cast("str", item[name])
        opened = {**item, name: ""}
        if "status" in opened:
            opened["status"] = "in_progress"
        place: Mapping[str, object] = {"output_index": index, "item_id": item["id"]}
        named = {"name": item["name"]} if name == "arguments" else {}
        frames = [self._event("response.output_item.added", output_index=index, item=opened)]
        if text:
            frames.append(self._event(f"response.{what}.delta", **place, delta=text))
        frames.append(self._event(f"response.{what}.done", **place, **named, **{name: text}))
        return [*frames, self._event("response.output_item.done", output_index=index, item=item)]

    def _event(self, kind: str, **fields: object) -> bytes:
        value = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        return frame(value, kind)


class _TextKind:
    """The names of the events of one kind of text."""

    def __init__(self, text: str, container: str, part: str, position: str, extra: Mapping[str, object]) -> None:
        self.text, self.container, self.part, self.position, self.extra = text, container, part, position, extra


_KINDS = {
    "output": _TextKind("output_text", "content_part", "output_text", "content_index", {"logprobs": []}),
    "reasoning": _TextKind("reasoning_text", "content_part", "reasoning_text", "content_index", {}),
    "summary": _TextKind("reasoning_summary_text", "reasoning_summary_part", "summary_text", "summary_index", {}),
}


class _TextItem:
    """An item whose text grows."""

    def __init__(self, kind: str, identity: str) -> None:
        self.kind, self.id = _KINDS[kind], identity
        self.text, self.index, self.is_open = "", 0, False

    @property
    def place(self) -> dict[str, object]:
        return {"item_id": self.id, "output_index": self.index, self.kind.position: 0}
