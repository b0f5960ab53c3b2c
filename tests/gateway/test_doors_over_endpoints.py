"""A door whose episode asks an OpenAI-compatible endpoint: unmodified SDKs of all dialects, streamed piece by piece."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

import aiohttp
import anyio
import pytest
from aiohttp import web
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI

from agentrl.client import Client, Door
from agentrl.types import StopReason, Trajectory
from tests.support.doors import CALC, HI, door_client, until
from tests.support.endpoints import ToolEndpoint, endpoint_client, serving

DEADLINE_S = 300


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Heard(NamedTuple):
    """An answer as an SDK has it."""

    identity: str
    pieces: list[str]
    """The text as it came."""
    reasoning: str
    calls: list[tuple[str, str]]
    """Names and arguments of the calls."""
    counts: tuple[int, int, int]
    """Tokens of the prompt, those of them that were cached, and sampled tokens."""
    turn: list[Any]
    """What the client sends back for the answer, and for the results of its calls."""


OnText = Callable[[], None]


async def ask_chat(door: Door, history: list[Any], on_text: OnText) -> Heard:
    """Ask by chat completions."""
    async with door_client(door) as remote:
        options: Any = {"stream": True, "stream_options": {"include_usage": True}}
        stream = await remote.chat.completions.create(model="m", messages=[*HI, *history], tools=[CALC], **options)
        pieces, reasoning, usage, identities = [], [], None, set()
        call: dict[str, Any] = {}
        async for chunk in stream:
            identities.add(chunk.id)
            usage = chunk.usage or usage
            for choice in chunk.choices:
                if choice.delta.content:
                    pieces.append(choice.delta.content)
                    on_text()
                reasoning.append(getattr(choice.delta, "reasoning_content", ""))
                for part in choice.delta.tool_calls or ():
                    call = part.model_dump(exclude={"index"})
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    counts = (usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens or 0, usage.completion_tokens)
    answer = {"role": "assistant", "content": "".join(pieces), "tool_calls": [call] if call else None}
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "5"}] if call else []
    calls = [(call["function"]["name"], call["function"]["arguments"])] if call else []
    return Heard(identities.pop(), pieces, "".join(reasoning), calls, counts, [answer, *results])


async def ask_responses(door: Door, history: list[Any], on_text: OnText) -> Heard:
    """Ask by Responses."""
    tool: Any = {"type": "function", "strict": False, **CALC["function"]}
    pieces: list[str] = []
    async with door_client(door) as remote:
        stream = await remote.responses.create(model="m", input=[*HI, *history], tools=[tool], stream=True)
        response = None
        async for event in stream:
            if event.type == "response.output_text.delta":
                pieces.append(event.delta)
                on_text()
            elif event.type == "response.completed":
                response = event.response
    assert response is not None
    assert response.usage is not None
    usage, items = response.usage, [item.model_dump(exclude_none=True) for item in response.output]
    calls = [item for item in items if item["type"] == "function_call"]
    results = [{"type": "function_call_output", "call_id": item["call_id"], "output": "5"} for item in calls]
    said = [part["text"] for item in items if item["type"] == "reasoning" for part in item["content"]]
    counts = (usage.input_tokens, usage.input_tokens_details.cached_tokens, usage.output_tokens)
    named = [(item["name"], item["arguments"]) for item in calls]
    return Heard(response.id, pieces, "".join(said), named, counts, [*items, *results])


async def ask_messages(door: Door, history: list[Any], on_text: OnText) -> Heard:
    """Ask by Messages."""
    function = CALC["function"]
    tool: Any = {"name": function["name"], "input_schema": function["parameters"]}
    pieces: list[str] = []
    thinking: Any = {"type": "enabled", "budget_tokens": 1024}
    async with (
        AsyncAnthropic(base_url=door.url, api_key=door.key, max_retries=0) as remote,
        remote.messages.stream(
            model="m", messages=[*HI, *history], tools=[tool], max_tokens=2000, thinking=thinking
        ) as stream,
    ):
        async for event in stream:
            if event.type == "text":
                pieces.append(event.text)
                on_text()
        message = await stream.get_final_message()
    blocks = [block.model_dump(exclude_none=True) for block in message.content]
    calls = [block for block in blocks if block["type"] == "tool_use"]
    results = [{"type": "tool_result", "tool_use_id": block["id"], "content": "5"} for block in calls]
    cached = message.usage.cache_read_input_tokens or 0
    return Heard(
        message.id,
        pieces,
        "".join(block["thinking"] for block in blocks if block["type"] == "thinking"),
        [(block["name"], str(block["input"])) for block in calls],
        (message.usage.input_tokens + cached, cached, message.usage.output_tokens),
        [{"role": "assistant", "content": blocks}, *([{"role": "user", "content": results}] if results else [])],
    )


Ask = Callable[[Door, list[Any], OnText], Awaitable[Heard]]
ASKS: dict[str, Ask] = {"chat": ask_chat, "responses": ask_responses, "messages": ask_messages}


async def two_turns(endpoint: ToolEndpoint, connection: AsyncOpenAI, ask: Ask) -> tuple[list[Heard], Trajectory]:
    """Play two turns by a dialect; the endpoint goes on with a stream when its first text has arrived."""
    client = endpoint_client(connection)
    with anyio.fail_after(DEADLINE_S):
        async with client.served() as door, aiohttp.ClientSession() as http:
            first = await ask(door, [], endpoint.release.set)
            second = await ask(door, first.turn, endpoint.release.set)
            for heard, value in ((first, 0.25), (second, 0.5)):
                body = {"reward": value, "response_id": heard.identity}
                async with http.post(door.reward_url, json=body) as response:
                    assert response.status == 200, await response.text()
    return [first, second], client.close(StopReason.COMPLETED, 1.0)


@pytest.mark.parametrize("dialect", ASKS)
async def test_a_stream_of_an_endpoint_comes_piece_by_piece_and_its_calls_whole(dialect: str):
    endpoint = ToolEndpoint()
    async with serving(endpoint.answer) as connection:
        heard, record = await two_turns(endpoint, connection, ASKS[dialect])
    assert [each.pieces for each in heard] == [["I a", "dd."], ["It ", "is ", "5."]]
    [(name, arguments)] = heard[0].calls
    assert (name, heard[1].calls) == ("calc", [])
    assert "op" in arguments
    assert [each.counts for each in heard] == [(70, 64, 9), (70, 64, 9)]
    assert len({each.identity for each in heard}) == 2
    assert [(turn.parent, turn.reward) for turn in record.turns] == [(None, 0.25), (0, 0.5)]
    assert record.turns[0].message["tool_calls"][0].keys() == {"id", "type", "function"}
    assert (record.metrics["prompt_tokens"], record.metrics["completion_tokens"]) == (140, 18)
    assert [message["role"] for message in endpoint.bodies[1]["messages"]] == ["user", "assistant", "tool"]
    assert endpoint.bodies[1]["messages"][1]["tool_calls"] == record.turns[0].message["tool_calls"]


@pytest.mark.parametrize("dialect", ASKS)
async def test_reasoning_of_an_endpoint_arrives_and_is_sent_back(dialect: str):
    endpoint = ToolEndpoint(reasoning="Two and three.")
    endpoint.release.set()
    async with serving(endpoint.answer) as connection:
        heard, record = await two_turns(endpoint, connection, ASKS[dialect])
    assert [each.reasoning for each in heard] == ["Two and three."] * 2
    assert [turn.parent for turn in record.turns] == [None, 0]
    assert record.turns[0].message["reasoning_content"] == "Two and three."


@pytest.mark.parametrize("identity", ["", "always the same"])
@pytest.mark.parametrize("dialect", ASKS)
async def test_each_answer_has_an_id_of_its_own_whatever_the_endpoint_says(dialect: str, identity: str):
    endpoint = ToolEndpoint(identity=identity)
    endpoint.release.set()
    async with serving(endpoint.answer) as connection:
        heard, record = await two_turns(endpoint, connection, ASKS[dialect])
    assert len({each.identity for each in heard}) == 2
    assert [turn.reward for turn in record.turns] == [0.25, 0.5]


async def test_a_stream_that_its_client_leaves_is_dropped_at_the_endpoint_and_records_nothing():
    endpoint, requests = ToolEndpoint(), list[web.Request]()

    async def answer(request: web.Request) -> web.StreamResponse:
        requests.append(request)
        return await endpoint.answer(request)

    async with serving(answer) as connection:
        client: Client = endpoint_client(connection)
        body = {"messages": HI, "stream": True}
        with anyio.fail_after(DEADLINE_S):
            async with client.served() as door, aiohttp.ClientSession() as http:
                async with http.post(f"{door.base_url}/chat/completions", json=body) as response:
                    assert b"I a" in await response.content.readuntil(b"I a")
                    response.close()
                await until(lambda: requests[0].transport is None or requests[0].transport.is_closing())
        endpoint.release.set()
    assert not client.turns


async def test_tokens_cannot_be_counted_where_the_model_is_out_of_sight():
    async with serving(ToolEndpoint().answer) as connection:
        client = endpoint_client(connection)
        async with (
            client.served() as door,
            aiohttp.ClientSession() as http,
            http.post(f"{door.url}/v1/messages/count_tokens", json={"messages": HI}) as response,
        ):
            said = await response.json()
    assert response.status == 404
    assert "count_tokens" in said["error"]["message"]
