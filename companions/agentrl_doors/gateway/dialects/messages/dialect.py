"""Anthropic's Messages as a dialect: blocks in, blocks out.

Invariant: the content of an answer, whole or streamed, reads back as the recorded message (`reading.BlockReader`), but for
reasoning where the call did not ask for thinking.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Final, cast

from agentrl.client.backend import Answer
from agentrl_doors.gateway.dialect import Caller, DialectCall
from agentrl_doors.gateway.dialects.callers import messages_caller
from agentrl_doors.gateway.dialects.messages.reading import BlockReader, choice_arguments, tools_of_blocks
from agentrl_doors.gateway.dialects.messages.writing import MessageEvents, answer_message, message_error
from agentrl_doors.gateway.fields import Fields, read_object
from agentrl_doors.gateway.items import ItemStore
from agentrl_doors.gateway.refusals import CallRefused

_SILENT: Final = frozenset({"metadata", "service_tier", "cache_control", "diagnostics", "inference_geo", "user_profile_id"})
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
        return answer_message(call, answer)

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
        return message_error(message, status=status, code=code)


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
