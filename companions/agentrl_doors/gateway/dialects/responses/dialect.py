"""OpenAI's Responses as a dialect: items in, items out.

Invariant: the output of a response, whole or streamed, reads back as the recorded message (`reading.ItemReader`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, cast

from agentrl.client.backend import Answer
from agentrl.servers.http.errors import json_bytes, openai_error
from agentrl_doors.gateway.dialect import Caller, DialectCall
from agentrl_doors.gateway.dialects.answers import created_now
from agentrl_doors.gateway.dialects.callers import responses_caller
from agentrl_doors.gateway.dialects.responses.reading import ItemReader, read_tool_choice, read_tools, resolved_input
from agentrl_doors.gateway.dialects.responses.writing import (
    ResponseEvents,
    ended,
    output_items,
    response_body,
    response_id,
)
from agentrl_doors.gateway.fields import Fields, read_object
from agentrl_doors.gateway.items import Item, ItemStore
from agentrl_doors.gateway.refusals import CallRefused

_SILENT: Final = (
    *("user", "metadata", "client_metadata", "store", "service_tier", "safety_identifier", "stream_options"),
    *("prompt_cache_key", "prompt_cache_retention", "prompt_cache_options"),
)
"""Fields about billing, caches and bookkeeping."""
_SAME_NAMES: Final = ("temperature", "top_p", "parallel_tool_calls", "top_logprobs")
_UNSERVED: Final = {
    "background": "a call is answered while its client waits; leave it out",
    "conversation": "conversations are not kept by name; send the input, or previous_response_id",
    "prompt": "there are no stored prompts; send the instructions",
}
_LOGPROBS: Final = "message.output_text.logprobs"
_INCLUDED: Final = frozenset({_LOGPROBS, "reasoning.encrypted_content"})


class ResponsesDialect:
    """`POST /v1/responses`."""

    name = "responses"

    def read(self, body: bytes, store: ItemStore | None, *, omit_media: bool = False) -> DialectCall:
        """Return a body as a call, items of earlier responses included."""
        sent = read_object(body)
        fields = Fields(sent)
        for name, why in _UNSERVED.items():
            if fields.any(name):
                raise CallRefused(f"{name}={sent[name]!r:.80} is not served: {why}")
        tools = read_tools(fields.any("tools"))
        previous = fields.read("previous_response_id", str)
        items = resolved_input(fields.any("input") if previous is None else sent.get("input", []), store)
        fields.skip(("input", *_SILENT, *(["truncation"] if sent.get("truncation") == "disabled" else [])))
        reader = ItemReader(omit_media=omit_media)
        messages = reader.read([*_earlier(previous, store), *items])
        instructions = fields.read("instructions", str)
        if instructions:
            messages.insert(0, {"role": "system", "content": instructions})
        if not messages:
            raise CallRefused("input is empty: send text, or at least one item")
        arguments, ignored = _response_arguments(fields)
        if tools.functions:
            arguments["tools"] = tools.functions
        elif arguments.get("parallel_tool_calls") is False:  # Codex compacts with it; without tools there are no calls
            del arguments["parallel_tool_calls"]
        if fields.any("tool_choice") is not None:
            arguments["tool_choice"] = read_tool_choice(sent["tool_choice"], tools.names)
        return DialectCall(
            model=fields.read("model", str),
            messages=messages,
            arguments=arguments,
            stream=fields.read("stream", bool) or False,
            ignored=(*fields.unread, *ignored, *tools.ignored, *sorted(reader.ignored)),
            body={**sent, "input": items},
        )

    def caller(self, call: DialectCall, headers: Mapping[str, str]) -> Caller:
        """Return who makes a call."""
        return responses_caller(call, headers)

    def answer(self, call: DialectCall, answer: Answer) -> dict[str, object]:
        """Return a response with all of its output."""
        body = response_body(call, response_id(answer.id), created=created_now())
        return ended(body, answer, output_items(call, answer, answer.id))

    def events(self, call: DialectCall, answer_id: str) -> ResponseEvents:
        """Return the writer of a response's events."""
        return ResponseEvents(call, answer_id)

    def keep(self, call: DialectCall, answer: Answer, store: ItemStore) -> None:
        """Keep the items of a call and of its answer, unless it says `store: false`."""
        if call.body.get("store") is False:
            return
        answered = output_items(call, answer, answer.id)
        sent = cast("list[Item]", call.body["input"])
        size = len(json_bytes([sent, answered]))
        store.keep(
            response_id(answer.id), cast("str | None", call.body.get("previous_response_id")), sent, answered, size=size
        )

    def answer_id(self, response_id: str) -> str:
        """Return the id of the answer that a response stands for."""
        return response_id.removeprefix("resp_")

    def refusal(self, message: str, *, status: int, code: str | None = None) -> dict[str, object]:
        """Return an error in OpenAI's shape."""
        return openai_error(message, status=status, code=code)


def _earlier(previous: str | None, store: ItemStore | None) -> list[Item]:
    """Return the items that `previous_response_id` stands for."""
    if previous is None:
        return []
    found = None if store is None else store.conversation(previous)
    if found is None:
        kept = "this server keeps nothing between calls" if store is None else "it is not one of this session"
        raise CallRefused(
            f"previous_response_id: there is no response {previous!r:.80}: {kept}; send the whole conversation as input",
            code="previous_response_not_found",
        )
    return found


def _response_arguments(fields: Fields) -> tuple[dict[str, object], list[str]]:
    """Return the arguments of chat completions that a body asks for, and the names that have no effect."""
    found = {name: value for name in _SAME_NAMES if (value := fields.any(name)) is not None}
    limit = fields.any("max_output_tokens")
    if limit is not None:
        found["max_completion_tokens"] = limit
    ignored: list[str] = []
    reasoning = Fields(fields.any("reasoning") or {}, "reasoning")
    reasoning.skip(("summary", "generate_summary"))
    ignored += reasoning.unread
    text = Fields(fields.any("text") or {}, "text")
    form = text.read("format", dict)
    ignored += text.unread
    if form is not None and form.get("type") != "text":
        found["response_format"] = _response_format(cast("Mapping[str, object]", form))
    included = cast("list[object]", fields.read("include", list) or [])
    if _LOGPROBS in included:
        found["logprobs"] = True
    else:
        found.pop("top_logprobs", None)
    ignored += [f"include.{each}"[:80] for each in included if each not in _INCLUDED]
    return found, ignored


def _response_format(form: Mapping[str, object]) -> Mapping[str, object]:
    if form.get("type") != "json_schema":
        return form
    inner = {name: value for name, value in form.items() if name != "type" and value is not None}
    return {"type": "json_schema", "json_schema": inner}
