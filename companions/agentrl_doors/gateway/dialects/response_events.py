"""The event stream of Responses.

Invariant: `response.completed` holds the items that `response.output_item.done` sent before it, and the deltas of an item
add up to its text. A call is sent when it is whole: clients run tools before the stream has ended.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

from agentrl.client.backend import Answer, Delta
from agentrl_doors.gateway.dialect import DialectCall
from agentrl_doors.gateway.dialects.answers import created_now, frame, said
from agentrl_doors.gateway.dialects.response_output import (
    ended,
    message_item,
    output_items,
    reasoning_item,
    response_body,
    response_id,
    text_logprobs,
    wants_summary,
)
from agentrl_doors.gateway.event_stream import COMMENT


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
