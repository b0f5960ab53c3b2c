"""The dialects alone: what they write reads back as it was recorded, and fits the models of the clients' packages."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from anthropic.types import Message as ClaudeMessage
from anthropic.types import RawMessageStreamEvent
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from agentrl.client.backend import Answer, Delta
from agentrl.inference.backend import Generation
from agentrl.tokens.messages import message_key
from agentrl.types import StopReason
from agentrl_doors.gateway.dialect import Dialect, EventWriter
from agentrl_doors.gateway.dialects import ChatDialect, MessagesDialect, ResponsesDialect
from agentrl_doors.gateway.items import ItemStore
from agentrl_doors.gateway.refusals import CallRefused

CHAT, RESPONSES, MESSAGES = ChatDialect(), ResponsesDialect(), MessagesDialect()
Json = dict[str, Any]
RESPONSE_EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
MESSAGE_EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
PARAMETERS = {"type": "object", "properties": {"a": {}}}
BODIES: dict[str, Json] = {
    "chat": {"messages": [{"role": "user", "content": "Hi"}]},
    "responses": {
        "input": [{"role": "user", "content": "Hi"}],
        "tools": [
            {"type": "function", "name": "calc", "parameters": PARAMETERS},
            {"type": "custom", "name": "patch"},
            {"type": "namespace", "name": "agents", "description": "Helpers.", "tools": [{"type": "custom", "name": "ask"}]},
        ],
        "include": ["reasoning.encrypted_content"],
    },
    "messages": {
        "max_tokens": 9,
        "thinking": {"type": "adaptive"},
        "messages": [{"role": "user", "content": "Hi"}],
        "tools": [{"name": "calc", "input_schema": PARAMETERS}],
    },
}
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
NUMBERS = st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False)
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXT,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(TEXT, inner, max_size=2),
    max_leaves=4,
)
CALCS = st.dictionaries(TEXT, JSON_VALUES, max_size=3).map(lambda value: ("calc", json.dumps(value)))
PATCHES = st.tuples(st.sampled_from(["patch", "agents__ask"]), TEXT.map(lambda text: json.dumps({"input": text})))


def read(dialect: Dialect, body: Mapping[str, object], store: ItemStore | None = None) -> Any:  # noqa: ANN401
    return dialect.read(json.dumps(body).encode(), store)


def answered(message: Json, *, truncated: bool = False, identity: str = "chatcmpl-1") -> Answer:
    reason = StopReason.LENGTH if truncated else StopReason.STOP
    ids = np.array([1, 2], np.int32)
    logprobs = np.zeros(2, np.float32)
    generation = Generation(output_ids=ids, output_logprobs=logprobs, spans=(), stop_reason=reason, cached_tokens=3)
    return Answer(id=identity, model="tiny", message=message, generation=generation, num_context=7)


def message_of(reasoning: str, content: str, calls: Sequence[tuple[str, str]]) -> Json:
    message: Json = {"role": "assistant", "content": content or (None if calls else "")}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = [
            {"id": f"call{at}", "type": "function", "function": {"name": name, "arguments": arguments}}
            for at, (name, arguments) in enumerate(calls)
        ]
    return message


def streamed(writer: EventWriter, answer: Answer, cut: int) -> list[Json]:
    """Return the events of an answer whose text comes in two pieces, the first of `cut` characters."""
    reasoning, content = answer.message.get("reasoning_content") or "", answer.message.get("content") or ""
    frames = [*writer.begin()]
    for pieces in ((reasoning[:cut], ""), (reasoning[cut:], ""), ("", content[:cut]), ("", content[cut:])):
        frames += writer.push(Delta(*pieces))
    frames += writer.finish(answer)
    lines = [line for frame in frames for line in frame.decode().split("\n") if line.startswith("data: {")]
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def blocks_of(events: Sequence[Json]) -> list[Json]:
    """Return the content that the events of a message add up to."""
    blocks: list[Json] = []
    for event in events:
        if event["type"] == "content_block_start":
            blocks.append({**event["content_block"], "json": ""})
        elif event["type"] == "content_block_delta":
            delta = {name: text for name, text in event["delta"].items() if name != "type"}
            for name, text in delta.items():
                name = "json" if name == "partial_json" else name
                blocks[event["index"]][name] = blocks[event["index"]].get(name, "") + text
    for block in blocks:
        text = block.pop("json")
        if block["type"] == "tool_use":
            block["input"] = json.loads(text)
    return blocks


def resent(dialect: Dialect, whole: Json, change: Callable[[Json], Json]) -> Json:
    """Return a body that sends an answer back, each part of it changed."""
    body = BODIES[dialect.name]
    if dialect.name == "chat":
        return {**body, "messages": [*body["messages"], change(whole["choices"][0]["message"])]}
    if dialect.name == "responses":
        return {**body, "input": [*body["input"], *map(change, whole["output"])]}
    answered = {"role": "assistant", "content": [*map(change, whole["content"])]}
    return {**body, "messages": [*body["messages"], answered, {"role": "user", "content": "Go on."}]}


def as_codex(part: Json) -> Json:
    return {**part, "content": None} if part.get("type") == "reasoning" else part


def as_claude(part: Json) -> Json:
    again = {**part, "cache_control": {"type": "ephemeral"}}
    return {**again, "input": dict(sorted(part["input"].items(), reverse=True))} if "input" in part else again


CHANGES: dict[str, Callable[[Json], Json]] = {"chat": dict, "responses": as_codex, "messages": as_claude}


@pytest.mark.parametrize("dialect", [CHAT, RESPONSES, MESSAGES], ids=lambda dialect: dialect.name)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_an_answer_that_a_client_sends_back_means_what_was_recorded(dialect: Dialect, data: st.DataObject) -> None:
    calls = st.lists(CALCS if dialect is not RESPONSES else CALCS | PATCHES, max_size=3)
    recorded = message_of(data.draw(TEXT), data.draw(TEXT.map(str.strip)), data.draw(calls))
    call = read(dialect, BODIES[dialect.name])
    answer = answered(recorded)
    whole = dialect.answer(call, answer)
    events = streamed(dialect.events(call, answer.id), answer, data.draw(st.integers(0, 20)))
    if dialect is RESPONSES:
        assert events[-1]["response"]["output"] == whole["output"]
        assert [event["item"] for event in events if event["type"] == "response.output_item.done"] == whole["output"]
    if dialect is MESSAGES:
        assert blocks_of(events) == whole["content"]
    messages = read(dialect, resent(dialect, json.loads(json.dumps(whole)), CHANGES[dialect.name])).messages
    message = next(each for each in reversed(messages) if each["role"] == "assistant")
    assert message_key(message).digest == message_key(recorded).digest
    assert (message_key(message).reasoning or "").strip() == (message_key(recorded).reasoning or "").strip()


ANSWERS = [
    message_of("", "", []),
    message_of("", "Four.", []),
    message_of("I add.", "Four.", []),
    message_of("I add.", "", [("calc", '{"a": 1}'), ("patch", '{"input": "x"}'), ("agents__ask", "{}"), ("none", "[")]),
]


@pytest.mark.parametrize("truncated", [False, True])
@pytest.mark.parametrize("message", ANSWERS)
def test_answers_and_events_fit_the_models_of_the_clients_packages(message: Json, truncated: bool) -> None:
    answer = answered(message, truncated=truncated)
    calls = {dialect.name: read(dialect, BODIES[dialect.name]) for dialect in (CHAT, RESPONSES, MESSAGES)}
    ChatCompletion.model_validate(CHAT.answer(calls["chat"], answer))
    for event in streamed(CHAT.events(calls["chat"], answer.id), answer, 2):
        ChatCompletionChunk.model_validate(event)
    for summary in ({}, {"reasoning": {"summary": "auto"}}):
        call = read(RESPONSES, {**BODIES["responses"], **summary})
        Response.model_validate(RESPONSES.answer(call, answer))
        for event in streamed(RESPONSES.events(call, answer.id), answer, 2):
            RESPONSE_EVENT.validate_python(event)
    ClaudeMessage.model_validate(MESSAGES.answer(calls["messages"], answer))
    for event in streamed(MESSAGES.events(calls["messages"], answer.id), answer, 2):
        assert event["type"] == "ping" or MESSAGE_EVENT.validate_python(event)


def test_a_failed_stream_ends_with_the_dialects_error() -> None:
    def failed(dialect: Dialect) -> Json:
        writer = dialect.events(read(dialect, BODIES[dialect.name]), "chatcmpl-1")
        writer.begin()
        return json.loads(writer.fail("gone", status=503)[0].decode().split("data: ")[1])

    assert failed(CHAT)["error"]["type"] == "server_error"
    assert failed(RESPONSES)["response"]["error"] == {"code": "server_error", "message": "gone"}
    assert failed(MESSAGES) == {"type": "error", "error": {"type": "overloaded_error", "message": "gone"}}


def test_a_response_continues_an_earlier_one_by_its_id_or_by_references_to_its_items() -> None:
    store = ItemStore()
    first = read(RESPONSES, {"input": "Hi", "instructions": "Be brief."}, store)
    answer = answered(message_of("I add.", "Four.", []))
    RESPONSES.keep(first, answer, store)
    whole: Any = RESPONSES.answer(first, answer)
    continued = read(RESPONSES, {"input": "Why?", "previous_response_id": whole["id"]}, store)
    references = [{"type": "item_reference", "id": item["id"]} for item in whole["output"]]
    referred = read(
        RESPONSES, {"input": [{"role": "user", "content": "Hi"}, *references, {"role": "user", "content": "Why?"}]}, store
    )
    expected = [{"role": "user", "content": "Hi"}, answer.message, {"role": "user", "content": "Why?"}]
    assert continued.messages == referred.messages == expected
    RESPONSES.keep(referred, answered(message_of("", "So.", []), identity="chatcmpl-2"), store)
    third = read(RESPONSES, {"input": "?", "previous_response_id": "resp_chatcmpl-2"}, store)
    assert third.messages == [*expected, {"role": "assistant", "content": "So."}, {"role": "user", "content": "?"}]
    assert RESPONSES.answer_id("resp_chatcmpl-2") == "chatcmpl-2"


def test_a_full_store_forgets_the_oldest_response_and_those_that_need_it() -> None:
    store = ItemStore(max_bytes=100)
    store.keep("a", None, [{"id": "1"}], [], size=60)
    store.keep("b", "a", [{"id": "2"}], [], size=60)
    assert (store.item("1"), store.conversation("a"), store.conversation("b")) == (None, None, None)
    assert store.item("2") == {"id": "2"}


def test_fields_without_effect_are_named() -> None:
    codex = read(
        RESPONSES,
        {
            "input": [{"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "x"}], "new": 1}],
            "reasoning": {"summary": "auto", "effort": "high"},
            "text": {"verbosity": "low"},
            "store": False,
            "client_metadata": {},
            "include": ["web_search_call.results"],
            "tools": [{"type": "function", "name": "f", "strict": False}, {"type": "tool_search"}],
            "shiny": True,
        },
    )
    assert codex.ignored == (
        *("shiny", "reasoning.effort", "text.verbosity", "include.web_search_call.results"),
        *("tools[].strict", "tools[].tool_search", "input[].message.new"),
    )
    claude = read(
        MESSAGES,
        {
            "max_tokens": 9,
            "system": [{"type": "text", "text": "a", "cache_control": {}}, {"type": "text", "text": "b"}],
            "messages": [{"role": "user", "content": "x"}, {"role": "system", "content": [{"type": "text", "text": "y"}]}],
            "thinking": {"type": "enabled", "budget_tokens": 9},
            "output_config": {"effort": "high"},
            "context_management": {},
            "tools": [
                {"type": "web_search_20250305", "name": "web_search"},
                {"name": "t", "input_schema": {}, "eager_input_streaming": True},
            ],
        },
    )
    assert claude.ignored == (
        *("context_management", "tools[].eager_input_streaming", "tools[].web_search_20250305"),
        *("output_config.effort", "thinking.budget_tokens"),
    )
    assert [message["content"] for message in claude.messages] == ["a\n\nb", "x", "y"]


def test_tool_results_become_messages_in_their_order_and_unparsed_input_is_what_was_sampled() -> None:
    raw = {"__unparsedToolInput": {"raw": '{"a": ', "len": 6}}
    content = [
        {
            "type": "tool_result",
            "tool_use_id": "1",
            "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}],
        },
        {"type": "tool_result", "tool_use_id": "2", "is_error": True},
        {"type": "text", "text": "Go on."},
    ]
    calling = {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "t", "input": raw}]}
    messages = read(MESSAGES, {"messages": [calling, {"role": "user", "content": content}]}).messages
    assert messages[0]["tool_calls"][0]["function"]["arguments"] == '{"a": '
    assert messages[1:] == [
        {"role": "tool", "tool_call_id": "1", "content": "one\n\ntwo"},
        {"role": "tool", "tool_call_id": "2", "content": "error"},
        {"role": "user", "content": "Go on."},
    ]


def test_a_response_without_tools_may_ask_for_one_call_at_most_as_a_compaction_of_codex_does() -> None:
    body: Json = {"input": "Summarize.", "parallel_tool_calls": False}
    assert "parallel_tool_calls" not in RESPONSES.read(json.dumps(body).encode(), None).arguments
    for tools in (BODIES["responses"]["tools"], [{"type": "web_search"}]):
        read = RESPONSES.read(json.dumps({**body, "tools": tools}).encode(), None).arguments
        assert ("tools" in read) == ("parallel_tool_calls" in read)


def test_tools_that_clients_of_anthropic_run_are_functions_with_their_published_arguments() -> None:
    tools = [
        {"type": "bash_20250124", "name": "bash"},
        {"type": "text_editor_20250728", "name": "str_replace_based_edit_tool", "max_characters": 100},
        {"type": "memory_20250818", "name": "memory"},
    ]
    call = read(MESSAGES, {**BODIES["messages"], "tools": tools})
    functions = {each["function"]["name"]: each["function"]["parameters"] for each in call.arguments["tools"]}
    assert functions.keys() == {"bash", "str_replace_based_edit_tool", "memory"}
    assert functions["bash"]["properties"].keys() == {"command", "restart"}
    editing = functions["str_replace_based_edit_tool"]["properties"]
    assert editing["command"]["enum"] == ["view", "create", "str_replace", "insert"]
    assert {"path", "file_text", "old_str", "new_str", "insert_line", "view_range"} <= editing.keys()
    assert "rename" in functions["memory"]["properties"]["command"]["enum"]
    assert call.ignored == ("tools[].max_characters",)


@pytest.mark.parametrize(
    ("dialect", "body", "named"),
    [
        (MESSAGES, {"tools": [{"type": "computer_20250124", "name": "computer"}]}, "computer_20250124"),
        (MESSAGES, {"tools": [{"type": "future_20270101", "name": "future"}]}, "future_20270101"),
        (RESPONSES, {"tools": [{"type": "local_shell"}]}, "local_shell"),
        (RESPONSES, {"tools": [{"type": "computer_use_preview"}]}, "computer_use_preview"),
        (RESPONSES, {"tools": [{"type": "apply_patch"}]}, "apply_patch"),
        (MESSAGES, {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "{"}]}, "prefill"),
    ],
)
def test_what_would_leave_the_agent_without_a_tool_or_its_beginning_is_refused_by_name(
    dialect: Dialect, body: Json, named: str
) -> None:
    with pytest.raises(CallRefused, match=named):
        read(dialect, {**BODIES[dialect.name], **body})
