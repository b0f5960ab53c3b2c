"""Responses and Messages over HTTP, for the clients of their own packages and for plain requests."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anthropic
import anyio
import openai
import pytest
from openai.types.responses import Response
from tokenizers import Tokenizer

from agentrl.client import SamplingConfig
from agentrl.servers.scripted.script import ScriptedCall
from tests.support.gateway import MODEL, Served, model_engine, script_engine, served

CALLING = '<think>\nI add.\n</think>\n\nLet me see.\n<tool_call>\n{"name": "calc", "arguments": {"a": 1.0}}\n</tool_call>'
PATCHING = '<tool_call>\n{"name": "patch", "arguments": {"input": "*** é"}}\n</tool_call>'
SPAWNING = '<tool_call>\n{"name": "agents__spawn", "arguments": {}}\n</tool_call>'
NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}
CALC: Any = {"type": "function", "name": "calc", "parameters": NO_PARAMETERS, "strict": True}
PATCH: Any = {"type": "custom", "name": "patch", "format": {"type": "grammar", "syntax": "lark", "definition": "start: X"}}
AGENTS: Any = {
    "type": "namespace",
    "name": "agents",
    "description": "Helpers.",
    "tools": [{"type": "function", "name": "spawn", "parameters": NO_PARAMETERS}],
}
BLOCK_CALC: Any = {"name": "calc", "input_schema": NO_PARAMETERS}
HI: Any = [{"role": "user", "content": "Hi"}]
THINKS: Any = {"type": "enabled", "budget_tokens": 1024}


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@asynccontextmanager
async def scripted(checkpoint: Path, *texts: str) -> AsyncGenerator[tuple[Served, list[str]]]:
    """Serve a script, and yield the server and the prompts that it gets."""
    prompts: list[str] = []
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))

    def reply(call: ScriptedCall) -> str:
        prompts.append(tokenizer.decode(call.input_ids.tolist(), skip_special_tokens=False))
        return texts[min(call.index, len(texts) - 1)]

    async with served(script_engine(checkpoint, reply), checkpoint) as server:
        yield server, prompts


@asynccontextmanager
async def claude(server: Served) -> AsyncGenerator[Any]:
    async with anthropic.AsyncAnthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        yield client


def without_times(response: Response) -> dict[str, Any]:
    return response.model_dump(exclude={"id", "created_at", "output"})


async def test_a_response_is_the_same_whole_and_streamed_and_its_output_goes_back_in(checkpoint: Path) -> None:
    async with scripted(checkpoint, CALLING, CALLING, "2") as (server, prompts):
        create = server.openai.responses.create
        arguments: dict[str, Any] = {"model": MODEL, "tools": [CALC], "instructions": "Be brief."}
        whole = await create(input="Hi", include=["reasoning.encrypted_content"], **arguments)
        async with server.openai.responses.stream(input="Hi", **arguments) as stream:
            events = [event async for event in stream]
            last = await stream.get_final_response()
        call: Any = whole.output[2]
        history: Any = [*HI, *whole.output, {"type": "function_call_output", "call_id": call.call_id, "output": "2"}]
        second = await create(input=history, **arguments)
    assert (
        [item.type for item in whole.output]
        == [item.type for item in last.output]
        == ["reasoning", "message", "function_call"]
    )
    assert (call.name, call.arguments) == ("calc", '{"a": 1.0}')
    assert whole.output_text == "Let me see."
    assert without_times(whole)["usage"] == without_times(last)["usage"]
    kinds = [event.type for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.completed"
    for item in last.output:
        assert kinds.count("response.output_item.done") == len(last.output), item
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == "Let me see."
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert second.output_text == "2"
    assert prompts[0] == prompts[1]
    assert '{"a": 1.0}' in prompts[2]
    assert "Let me see." in prompts[2]


async def test_custom_and_nested_tools_are_answered_as_the_call_names_them(checkpoint: Path) -> None:
    async with scripted(checkpoint, PATCHING, SPAWNING, PATCHING) as (server, prompts):
        tools: Any = [PATCH, AGENTS, {"type": "web_search"}]
        create = server.openai.responses.create
        patched, spawned = [await create(model=MODEL, input="Hi", tools=tools) for _ in range(2)]
        stream = await create(model=MODEL, input="Hi", tools=tools, stream=True)
        done = [event.item async for event in stream if event.type == "response.output_item.done"]
        _, told = await server.get("/")
    patch: Any = patched.output[0]
    spawn: Any = spawned.output[0]
    streamed: Any = done[0]
    assert (patch.type, patch.input, streamed.type, streamed.input) == ("custom_tool_call", "*** é") * 2
    assert (spawn.type, spawn.name, spawn.namespace) == ("function_call", "spawn", "agents")
    assert "start: X" in prompts[0]
    assert told["ignored_fields"]["tools[].web_search"] == 3


async def test_a_message_is_the_same_whole_and_streamed_and_its_content_goes_back_in(checkpoint: Path) -> None:
    async with scripted(checkpoint, CALLING, CALLING, "2") as (server, prompts), claude(server) as client:
        arguments: dict[str, Any] = {"model": MODEL, "max_tokens": 64, "tools": [BLOCK_CALC], "thinking": THINKS}
        whole = await client.messages.create(messages=HI, system="Be brief.", **arguments)
        async with client.messages.stream(
            messages=HI, system=[{"type": "text", "text": "Be brief."}], **arguments
        ) as stream:
            kinds = [event.type async for event in stream]
            last = await stream.get_final_message()
        result = {"type": "tool_result", "tool_use_id": whole.content[2].id, "content": [{"type": "text", "text": "2"}]}
        marked = {**result, "cache_control": {"type": "ephemeral"}}
        history = [*HI, {"role": "assistant", "content": whole.content}, {"role": "user", "content": [marked]}]
        second = await client.messages.create(messages=history, **arguments)
        counted = await client.messages.count_tokens(model=MODEL, messages=HI, system="Be brief.", tools=[BLOCK_CALC])
        prefilled: Any = [*HI, {"role": "assistant", "content": "The sum is"}]
        with_prefill = await client.messages.count_tokens(model=MODEL, messages=prefilled)
    assert [block.type for block in whole.content] == ["thinking", "text", "tool_use"]
    assert (whole.content[0].thinking, whole.content[1].text) == ("I add.", "Let me see.")
    assert whole.content[2].input == {"a": 1.0}
    assert (whole.stop_reason, second.stop_reason, second.content[0].text) == ("tool_use", "end_turn", "2")
    assert [block.model_dump(exclude={"id"}) for block in whole.content] == [
        block.model_dump(exclude={"id"}, include=type(block).model_fields.keys() - {"parsed_output"})
        for block in last.content
    ]
    assert kinds[0] == "message_start"
    assert kinds[-1] == "message_stop"
    assert prompts[0] == prompts[1]
    assert counted.input_tokens == whole.usage.input_tokens + whole.usage.cache_read_input_tokens
    assert last.usage.input_tokens + last.usage.cache_read_input_tokens == counted.input_tokens
    assert with_prefill.input_tokens > 0


async def test_a_stop_sequence_a_cut_and_a_hidden_thought_are_told(checkpoint: Path) -> None:
    async with scripted(checkpoint, "one two three", "one two three", CALLING) as (server, _), claude(server) as client:
        stopped = await client.messages.create(model=MODEL, max_tokens=64, messages=HI, stop_sequences=["two"])
        cut = await client.messages.create(model=MODEL, max_tokens=1, messages=HI)
        hidden = await client.messages.create(model=MODEL, max_tokens=64, messages=HI, tools=[BLOCK_CALC])
        short = await server.openai.responses.create(model=MODEL, input="Hi", max_output_tokens=1)
    assert (stopped.stop_reason, stopped.stop_sequence, stopped.content[0].text) == ("stop_sequence", "two", "one ")
    assert cut.stop_reason == "max_tokens"
    assert [block.type for block in hidden.content] == ["text", "tool_use"]
    assert (short.status, short.incomplete_details and short.incomplete_details.reason) == (
        "incomplete",
        "max_output_tokens",
    )


async def test_clients_find_the_model_and_the_server(checkpoint: Path) -> None:
    async with scripted(checkpoint, "2") as (server, _), claude(server) as client:
        listed = [model.id async for model in client.models.list()]
        one = await client.models.retrieve(MODEL)
        async with server.session.head(server.url + "/") as head:
            status = head.status
    assert (listed, one.id, one.type, status) == ([MODEL], MODEL, "model", 200)


PICTURE: Any = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
DEEP: Any = json.loads("[" * 200 + "]" * 200)
TOOLS: Any = [{"name": f"t{at}", "input_schema": NO_PARAMETERS} for at in range(10_000)]
REFUSED_MESSAGES: list[tuple[Any, str]] = [
    ({}, "messages is missing"),
    ({"messages": []}, "messages is empty"),
    ({"messages": HI, "thread": {"type": "create"}}, "thread is not served"),
    ({"messages": [{"role": "user", "content": [PICTURE]}]}, "messages[0].content[0] is of type 'image'"),
    ({"messages": [{"role": "critic", "content": "x"}]}, "messages[0].role must be one of"),
    ({"messages": HI, "tools": TOOLS}, "10000 tools"),
    ({"messages": HI, "tools": [{"name": "t", "description": "x" * 600_000}]}, "bytes of JSON"),
    ({"messages": HI, "metadata": DEEP}, "nested more than"),
    ({"messages": HI, "tool_choice": {"type": "any"}, "tools": [BLOCK_CALC]}, "no call can be forced"),
    ({"messages": HI, "temperature": "hot"}, "temperature must be"),
]


async def test_wrong_messages_are_refused_by_name_in_anthropics_shape(checkpoint: Path) -> None:
    async with scripted(checkpoint, "2") as (server, prompts), claude(server) as client:
        for body, what in REFUSED_MESSAGES:
            status, reply = await server.post("/v1/messages", {"model": MODEL, "max_tokens": 8, **body})
            assert (status, reply["type"], reply["error"]["type"]) == (400, "error", "invalid_request_error"), body.keys()
            assert what in reply["error"]["message"]
        with pytest.raises(anthropic.BadRequestError) as threaded:
            await client.beta.messages.create(
                model=MODEL, max_tokens=8, messages=HI, extra_body={"thread": {"type": "create"}}
            )
        with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: \d+ tokens > \d+ maximum"):
            await client.messages.create(model=MODEL, max_tokens=8, messages=[{"role": "user", "content": "word " * 9000}])
        with pytest.raises(anthropic.NotFoundError):
            await client.messages.create(model="gpt-9", max_tokens=8, messages=HI)
        status, reply = await server.post("/v1/messages/batches", {})
        assert (status, reply["type"]) == (404, "error")
    refused: Any = threaded.value.body
    assert refused["error"]["details"]["error_code"] == "thread_unsupported_request"
    assert prompts == []


SEEN: Any = {"type": "input_image", "image_url": "data:image/png;base64,"}
REFUSED_RESPONSES: list[tuple[Any, int, str | None, str]] = [
    ({}, 400, None, "input must be text or a list"),
    ({"input": []}, 400, None, "input is empty"),
    ({"input": [{"role": "user", "content": [SEEN]}]}, 400, "unsupported_input", "'input_image'"),
    ({"input": [{"type": "computer_call", "id": "x"}]}, 400, None, "'computer_call'"),
    ({"input": [{"type": "item_reference", "id": "msg_1"}]}, 404, "item_not_found", "'msg_1'"),
    ({"input": "x", "previous_response_id": "resp_1"}, 400, "previous_response_not_found", "'resp_1'"),
    ({"input": "x", "background": True}, 400, None, "background"),
    ({"input": "x", "conversation": "c"}, 400, None, "conversation"),
    ({"input": "x", "tools": [CALC, CALC]}, 400, None, "two tools are named 'calc'"),
    ({"input": "x", "text": {"format": {"type": "json_schema", "name": "n", "schema": {}}}}, 400, None, "response_format"),
    ({"input": "x", "model": "gpt-9"}, 404, "model_not_found", "gpt-9"),
    ({"input": "word " * 9000}, 400, "context_length_exceeded", "tokens"),
]


async def test_wrong_responses_are_refused_by_name(checkpoint: Path) -> None:
    async with scripted(checkpoint, "2") as (server, prompts):
        for body, status, code, what in REFUSED_RESPONSES:
            got = await server.error("/v1/responses", {"model": MODEL, **body})
            assert got[:2] == (status, code), body
            assert what in got[2]
        async with server.session.post(
            server.url + "/v1/responses", data=b"{", headers={"Content-Type": "application/json"}
        ) as reply:
            assert reply.status == 400
        with pytest.raises(openai.BadRequestError):
            await server.openai.responses.create(model=MODEL, input="x", stream=True, background=True)
    assert prompts == []


BROKEN = [b"", b"{", b"[1]", b"\xff", b'{"a": "\\ud800"}', b"[" * 100_000, b'{"a":' * 100_000]


async def test_a_body_that_is_no_json_object_is_refused(checkpoint: Path) -> None:
    async with scripted(checkpoint, "2") as (server, _):
        for body in BROKEN:
            for path in ("/v1/responses", "/v1/messages", "/v1/messages/count_tokens"):
                headers = {"Content-Type": "application/json"}
                async with server.session.post(server.url + path, data=body, headers=headers) as reply:
                    assert (reply.status, "message" in (await reply.json())["error"]) == (400, True), body[:9]


async def test_a_key_may_come_as_either_kind_of_client_sends_it(checkpoint: Path) -> None:
    async with served(script_engine(checkpoint, lambda call: "2"), checkpoint, api_key="secret") as server:
        body: dict[str, Any] = {"max_tokens": 8, "messages": HI}
        right, wrong = [await server.post("/v1/messages", body, headers={"x-api-key": key}) for key in ("secret", "other")]
        async with anthropic.AsyncAnthropic(base_url=server.url, api_key="other", max_retries=0) as client:
            with pytest.raises(anthropic.AuthenticationError):
                await client.messages.create(model=MODEL, **body)
    assert right[0] == 200
    assert (wrong[0], wrong[1]["type"], wrong[1]["error"]["type"]) == (401, "error", "authentication_error")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_disconnects_aborts_what_its_message_samples(checkpoint: Path, stream: bool) -> None:
    async with served(model_engine(checkpoint, turn_s=0), checkpoint) as server:
        body = {"messages": HI, "max_tokens": 4000, "stream": stream}
        with anyio.fail_after(300):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(server.post, "/v1/messages", body)
                while not (await server.get("/v1/loads"))[1]["loads"][0]["num_running_reqs"]:
                    pass
                tasks.cancel_scope.cancel()
            while (await server.get("/v1/loads"))[1]["loads"][0]["num_running_reqs"]:
                pass


async def test_a_demand_is_put_into_the_prompt_where_the_server_is_told_to(checkpoint: Path) -> None:
    sampling, prompts = SamplingConfig(unsupported="prompt"), list[str]()
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))

    def reply(call: ScriptedCall) -> str:
        prompts.append(tokenizer.decode(call.input_ids.tolist(), skip_special_tokens=False))
        return '{"n": 1}'

    schema: Any = {"type": "object", "properties": {"n": {"type": "integer"}}}
    async with served(script_engine(checkpoint, reply), checkpoint, sampling=sampling) as server, claude(server) as client:
        form: Any = {"format": {"type": "json_schema", "name": "out", "schema": schema}}
        await server.openai.responses.create(model=MODEL, input="Hi", text=form)
        await client.messages.create(
            model=MODEL, max_tokens=8, messages=HI, output_config={"format": {"type": "json_schema", "schema": schema}}
        )
        await client.messages.create(
            model=MODEL, max_tokens=64, messages=HI, tools=[BLOCK_CALC], tool_choice={"type": "any"}
        )
    assert "It must fit this JSON schema" in prompts[0]
    assert "It must fit this JSON schema" in prompts[1]
    assert "Answer with a tool call." in prompts[2]
