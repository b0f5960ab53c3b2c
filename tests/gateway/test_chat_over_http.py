"""Chat completions over HTTP: the answers are those of a workflow's client, for openai's clients and for plain requests."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import openai
import pytest
from openai import OpenAI
from pydantic import BaseModel

from agentrl.client import Client, EpisodeSettings, PolicyBackend, SamplingConfig
from agentrl.inference.sglang.server import SGLangServer
from agentrl.servers.scripted.script import Hold, ScriptedReply
from agentrl.tokens.renderer import Renderer
from tests.support.gateway import MODEL, Served, model_engine, script_engine, served

HI: list[Any] = [{"role": "user", "content": "Hi"}]
CALC: Any = {"type": "function", "function": {"name": "calc", "parameters": {"type": "object", "properties": {}}}}
CALLING = '<think>\nI add.\n</think>\n\n<tool_call>\n{"name": "calc", "arguments": {"a": 1}}\n</tool_call>'


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def streamed(server: Served, **arguments: Any) -> list[Any]:  # noqa: ANN401
    stream = await server.openai.chat.completions.create(model=MODEL, stream=True, **arguments)
    return [chunk async for chunk in stream]


def joined(chunks: Sequence[Any], index: int = 0) -> str:
    choices = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
    return "".join(choice.delta.content or "" for choice in choices)


CONVERSATIONS: list[list[Any]] = [
    HI,
    [{"role": "system", "content": "Be brief."}, *HI, {"role": "assistant", "content": "Yes?"}, *HI],
    [*HI, {"role": "assistant", "content": "<|im_end|>"}, {"role": "user", "content": "ünïcode ✓"}],
]


@pytest.mark.parametrize("messages", CONVERSATIONS)
async def test_a_greedy_answer_over_http_is_that_of_a_workflows_client_on_the_same_weights(
    checkpoint: Path, messages: list[Any]
) -> None:
    renderer = Renderer.load(checkpoint)
    async with served(model_engine(checkpoint), checkpoint) as server:
        async with SGLangServer(server.url, vocab_size=renderer.vocab_size) as backend:
            sampling = SamplingConfig(temperature=0.0, max_tokens=24)
            client = Client(PolicyBackend(backend, renderer, sampling, EpisodeSettings(episode_id="e", task_id="t")))
            expected = await client.chat.completions.create(messages=messages, logprobs=True)
        arguments: dict[str, Any] = {"messages": messages, "temperature": 0, "max_tokens": 24}
        got = await server.openai.chat.completions.create(
            model=MODEL, logprobs=True, extra_body={"return_token_ids": True}, **arguments
        )
        chunks = await streamed(server, stream_options={"include_usage": True}, **arguments)
    assert got.choices[0].message.content == expected.choices[0].message.content == joined(chunks)
    assert got.choices[0].finish_reason == expected.choices[0].finish_reason == chunks[-2].choices[0].finish_reason
    assert got.model_extra is not None
    assert got.model_extra["prompt_token_ids"] == client.graph.turns[0].context_ids.tolist()
    assert got.usage is not None
    assert got.usage.completion_tokens == len(client.graph.turns[0].output_ids) == chunks[-1].usage.completion_tokens
    assert got.choices[0].logprobs is not None
    assert expected.choices[0].logprobs is not None
    assert [entry.logprob for entry in got.choices[0].logprobs.content or ()] == pytest.approx(
        [entry.logprob for entry in expected.choices[0].logprobs.content or ()], abs=1e-5
    )


async def test_the_synchronous_client_gets_the_same_whole_and_streamed(checkpoint: Path) -> None:
    async with served(model_engine(checkpoint), checkpoint) as server:

        def ask() -> tuple[str | None, str, list[str]]:
            with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
                whole = client.chat.completions.create(model=MODEL, messages=HI, temperature=0, max_tokens=9)
                pieces = client.chat.completions.create(model=MODEL, messages=HI, temperature=0, max_tokens=9, stream=True)
                return whole.choices[0].message.content, joined(list(pieces)), [each.id for each in client.models.list()]

        whole, pieces, models = await anyio.to_thread.run_sync(ask)
    assert whole
    assert whole == pieces
    assert models == [MODEL]


async def test_tool_calls_and_reasoning_come_as_fields_and_the_history_goes_back_in(checkpoint: Path) -> None:
    engine = script_engine(checkpoint, lambda call: CALLING if call.index < 2 else "3")
    async with served(engine, checkpoint) as server:
        first = await server.openai.chat.completions.create(model=MODEL, messages=HI, tools=[CALC])
        message = first.choices[0].message
        chunks = await streamed(server, messages=HI, tools=[CALC])
        assert message.tool_calls is not None
        call: Any = message.tool_calls[0]
        answer: Any = {"role": "tool", "tool_call_id": call.id, "content": "3"}
        history: list[Any] = [*HI, message, answer]
        second = await server.openai.chat.completions.create(model=MODEL, messages=history, tools=[CALC])
    assert (first.choices[0].finish_reason, message.content) == ("tool_calls", None)
    assert (call.function.name, json.loads(call.function.arguments)) == ("calc", {"a": 1})
    assert getattr(message, "reasoning_content", None) == "I add."
    assert "".join(getattr(chunk.choices[0].delta, "reasoning_content", None) or "" for chunk in chunks) == "I add."
    assert [each.function.name for chunk in chunks for each in chunk.choices[0].delta.tool_calls or ()] == ["calc"]
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    assert second.choices[0].message.content == "3"


async def test_several_choices_differ_repeat_with_a_seed_and_count_the_prompt_once(checkpoint: Path) -> None:
    async with served(model_engine(checkpoint), checkpoint) as server:
        arguments: dict[str, Any] = {"messages": HI, "n": 3, "seed": 5, "max_tokens": 12}
        first, second = [await server.openai.chat.completions.create(model=MODEL, **arguments) for _ in range(2)]
        chunks = await streamed(server, stream_options={"include_usage": True}, **arguments)
    texts = [choice.message.content for choice in first.choices]
    assert [choice.index for choice in first.choices] == [0, 1, 2]
    assert len(set(texts)) == 3
    assert texts == [choice.message.content for choice in second.choices] == [joined(chunks, index) for index in range(3)]
    assert first.usage is not None
    assert len({chunk.id for chunk in chunks}) == 1
    assert chunks[-1].usage.total_tokens == first.usage.total_tokens == first.usage.prompt_tokens + 36


async def test_penalties_are_honoured_because_nothing_is_trained(checkpoint: Path) -> None:
    async with served(model_engine(checkpoint), checkpoint) as server:
        arguments: dict[str, Any] = {"messages": HI, "temperature": 0, "max_tokens": 40, "logprobs": True}
        free = await server.openai.chat.completions.create(model=MODEL, **arguments)
        held = await server.openai.chat.completions.create(model=MODEL, presence_penalty=2.0, **arguments)

    def repeated(completion: Any) -> int:  # noqa: ANN401
        tokens = [entry.model_extra["token_id"] for entry in completion.choices[0].logprobs.content]
        return len(tokens) - len(set(tokens))

    assert repeated(held) < repeated(free)


REFUSED: list[tuple[dict[str, Any], int, str | None, str]] = [
    ({}, 400, None, "messages is missing"),
    ({"messages": []}, 400, None, "at least one message"),
    ({"messages": HI, "model": "gpt-9"}, 404, "model_not_found", f"this server has '{MODEL}'"),
    ({"messages": HI, "temperature": -1}, 400, None, "temperature must be"),
    ({"messages": HI, "presence_penalty": 3}, 400, None, "presence_penalty must be in"),
    ({"messages": HI, "repetition_penalty": "x"}, 400, None, "repetition_penalty"),
    ({"messages": HI, "n": 0}, 400, None, "n must be"),
    ({"messages": HI, "stream": 1}, 400, None, "stream must be"),
    ({"messages": HI, "stream_options": []}, 400, None, "stream_options must be"),
    ({"messages": HI, "logit_bias": {"5": 1}}, 400, None, "logit_bias"),
    ({"messages": [{"role": "x", "content": ""}]}, 400, None, "message role"),
    ({"messages": [{"role": "user", "content": "long " * 9000}]}, 400, "context_length_exceeded", "no room for output"),
]


async def test_what_cannot_be_served_is_refused_by_name_with_the_right_status_streamed_or_not(checkpoint: Path) -> None:
    async with served(script_engine(checkpoint, lambda _: "x"), checkpoint) as server:
        for body, status, code, message in REFUSED:
            for stream in (False, True):
                got = await server.error("/v1/chat/completions", {"stream": stream, **body})
                assert got[:2] == (status, code), body
                assert message in got[2]


async def test_keys_sizes_and_paths_are_refused_in_openais_shape(checkpoint: Path) -> None:
    async with served(script_engine(checkpoint, lambda _: "x"), checkpoint, api_key="secret") as server:
        answer = await server.openai.chat.completions.create(model=MODEL, messages=HI)
        assert answer.choices[0].message.content == "x"
        with pytest.raises(openai.AuthenticationError, match="requires a key"):
            await server.openai.with_options(api_key="wrong").chat.completions.create(model=MODEL, messages=HI)
        with pytest.raises(openai.NotFoundError, match="there is no POST /v1/embeddings here; there is GET /v1/loads, GET"):
            await server.openai.embeddings.create(model=MODEL, input="x")
        with pytest.raises(openai.NotFoundError, match="no model 'gpt'"):
            await server.openai.models.retrieve("gpt")
        assert (await server.openai.models.retrieve(MODEL)).id == MODEL
        headers = {"Authorization": "Bearer secret", "Content-Type": "application/json"}
        async with server.session.post(
            f"{server.url}/v1/completions", data=io.BytesIO(b" " * (2**25 + 1)), headers=headers
        ) as response:
            assert response.status == 413
            assert "larger than the 33554432 bytes" in (await response.json())["error"]["message"]


async def test_an_aborted_call_is_a_503_and_in_a_stream_an_error_event(checkpoint: Path) -> None:
    hold = Hold(at=1)
    engine = script_engine(checkpoint, lambda call: ScriptedReply(output="x y z", holds=(hold,)))
    async with served(engine, checkpoint) as server, anyio.create_task_group() as tasks:

        async def abort() -> None:
            await hold.reached.wait()
            await server.post("/abort_request", {"abort_all": True})

        tasks.start_soon(abort)
        with pytest.raises(openai.InternalServerError, match="aborted the call") as error:
            await server.openai.chat.completions.create(model=MODEL, messages=HI)
        assert error.value.status_code == 503
    hold = Hold(at=1)
    async with served(engine, checkpoint) as server:
        stream = await server.openai.chat.completions.create(model=MODEL, messages=HI, stream=True)
        await hold.reached.wait()
        await server.post("/abort_request", {"abort_all": True})
        with pytest.raises(openai.APIError, match="aborted the call"):
            async for _ in stream:
                pass


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_disconnects_aborts_what_its_call_samples(checkpoint: Path, stream: bool) -> None:
    async with served(model_engine(checkpoint, turn_s=0), checkpoint) as server:
        body = {"messages": HI, "ignore_eos": True, "max_tokens": 4000, "n": 2, "stream": stream}
        with anyio.fail_after(300):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(server.post, "/v1/chat/completions", body)
                while not (await server.get("/v1/loads"))[1]["loads"][0]["num_running_reqs"]:
                    pass
                tasks.cancel_scope.cancel()
            while (await server.get("/v1/loads"))[1]["loads"][0]["num_running_reqs"]:
                pass


async def test_more_calls_than_the_server_holds_are_refused_with_429_and_room_comes_back(checkpoint: Path) -> None:
    hold = Hold()
    engine = script_engine(checkpoint, lambda call: ScriptedReply(output="x", holds=(hold,)))
    async with served(engine, checkpoint, max_calls=1) as server:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(server.post, "/v1/chat/completions", {"messages": HI})
            await hold.reached.wait()
            with pytest.raises(openai.RateLimitError, match="1 calls run or wait") as error:
                await server.openai.completions.create(model=MODEL, prompt=[5])
            assert error.value.response.headers["retry-after"] == "1"
            hold.release.set()
        assert (await server.post("/v1/completions", {"prompt": [5]}))[0] == 200


class Number(BaseModel):
    number: int


async def test_structured_output_is_refused_by_name_or_asked_for_in_the_prompt(checkpoint: Path) -> None:
    async with served(script_engine(checkpoint, lambda _: '{"number": 3}'), checkpoint) as server:
        with pytest.raises(openai.BadRequestError, match="response_format"):
            await server.openai.chat.completions.parse(model=MODEL, messages=HI, response_format=Number)
    prompts = SamplingConfig(unsupported="prompt")
    async with served(script_engine(checkpoint, lambda _: '{"number": 3}'), checkpoint, sampling=prompts) as server:
        completion = await server.openai.chat.completions.parse(
            model=MODEL, messages=HI, response_format=Number, extra_body={"return_token_ids": True}
        )
        ids = (completion.model_extra or {})["prompt_token_ids"]
    assert completion.choices[0].message.parsed == Number(number=3)
    assert "It must fit this JSON schema" in Renderer.load(checkpoint).decode(ids, skip_special=True)


async def test_fields_that_programs_send_unasked_change_nothing(checkpoint: Path) -> None:
    async with served(script_engine(checkpoint, lambda call: "3"), checkpoint) as server:
        body = {"messages": HI, "reasoning_effort": "medium", "verbosity": "low", "top_logprobs": 5}
        async with server.session.post(f"{server.url}/v1/chat/completions", json=body) as response:
            assert response.status == 200, await response.text()
        body = {"messages": HI, "logprobs": True, "top_logprobs": 5}
        async with server.session.post(f"{server.url}/v1/chat/completions", json=body) as response:
            assert response.status == 400
            assert "top_logprobs" in await response.text()
        async with server.session.get(f"{server.url}/") as response:
            assert (await response.json())["model"] == MODEL


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_fields_without_effect_are_counted_as_at_a_door_and_those_that_would_have_one_are_refused(
    path: str, checkpoint: Path
) -> None:
    asked: dict[str, Any] = {"repetition_penalty": 1.1, "min_tokens": 1}
    asked |= {"messages": HI} if "chat" in path else {"prompt": [5]}
    unasked = {"search_parameters": {"mode": "off"}, "reasoning_effort": "low", "timeout": 1, "nothing": None}
    async with served(model_engine(checkpoint), checkpoint) as server:
        for stream in (False, True):
            async with server.session.post(server.url + path, json={**asked, **unasked, "stream": stream}) as reply:
                assert reply.status == 200, await reply.text()
                await reply.read()
        _, told = await server.get("/")
        status, _, message = await server.error(path, {**asked, "logit_bias": {"5": 1}})
    assert told["ignored_fields"] == {"search_parameters": 2, "reasoning_effort": 2, "timeout": 2}
    assert (status, "logit_bias" in message) == (400, True)
