"""Streaming: chunks that add up to the completion, recorded with the last token, dropped when left early."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai import AsyncStream
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from tokenizers import Tokenizer

from agentrl.client import CallTimeout, ChatStream, Client, EpisodeSettings, PolicyBackend, SamplingConfig
from agentrl.errors import EpisodeLimit, ReplyError, ServerUnavailable, TokenError
from agentrl.inference.backend import GenerateRequest, Generation, GenerationChunk
from agentrl.tokens.renderer import Renderer
from agentrl.types import StopReason, Turn, VersionSpan
from tests.client.conftest import Says
from tests.support.chat import CALL, HI, Make, calc
from tests.tokens.families import FAMILIES, write_family

ANSWERS = [
    "Plain text, with some é accents and ünicode 🙂.",
    "<think>\nfirst I add\n\n</think>\n\nIt is 42.",
    "<think>\nadd\n</think>\n\nLet me see.\n" + CALL,
    CALL + "\n" + CALL,
    "  leading space, <tool_call>broken",
    "<think>never closed",
]


async def collect(client: Client, **arguments: Any) -> tuple[list[ChatCompletionChunk], ChatCompletion]:  # noqa: ANN401
    state = ChatCompletionStreamState()
    chunks: list[ChatCompletionChunk] = []
    async for chunk in await client.chat.completions.create(messages=HI, stream=True, **arguments):
        chunks.append(chunk)
        state.handle_chunk(chunk)
    return chunks, state.current_completion_snapshot


def fields(completion: ChatCompletion) -> dict[str, Any]:
    choice = completion.choices[0]
    calls = [(c.id, c.function.name, c.function.arguments) for c in choice.message.tool_calls or [] if c.type == "function"]
    return {
        "content": choice.message.content or "",
        "reasoning": (choice.message.model_extra or {}).get("reasoning_content"),
        "calls": [call[1:] for call in calls],
        "finish": choice.finish_reason,
        "model": completion.model,
    }


def both_ways(
    renderer: Renderer, tokenizer: Tokenizer, ids: list[int], **arguments: Any,  # noqa: ANN401
) -> tuple[dict[str, Any], dict[str, Any]]:  # fmt: skip
    """Return what a stream of sampled ids adds up to, and the completion of the same ids."""

    async def both() -> tuple[dict[str, Any], dict[str, Any]]:
        says = Says(tokenizer)
        says.script = [
            Generation(
                output_ids=np.array(ids, np.int32), output_logprobs=np.full(len(ids), -1, np.float32),
                spans=(VersionSpan(start=0, end=len(ids), version=0),), stop_reason=StopReason.LENGTH,
            )
        ]  # fmt: skip
        settings = EpisodeSettings(episode_id="e", task_id="t")
        make = lambda: Client(PolicyBackend(says, renderer, SamplingConfig(), settings))  # noqa: E731
        completion = await make().chat.completions.create(messages=HI, **arguments)
        return fields((await collect(make(), **arguments))[1]), fields(completion)

    return anyio.run(both)


@pytest.fixture(scope="module")
def mistral(tmp_path_factory: pytest.TempPathFactory) -> tuple[Renderer, Tokenizer]:
    """A tokenizer with byte fallback."""
    path = write_family(tmp_path_factory.mktemp("family") / "mistral", FAMILIES["mistral"])
    return Renderer.load(path), Tokenizer.from_file(str(path / "tokenizer.json"))


@pytest.mark.parametrize("answer", ANSWERS)
async def test_a_stream_adds_up_to_the_completion(make_client: Make, says: Says, answer: str):
    says.script = [answer]
    whole, streamed = make_client(), make_client()
    completion = await whole.chat.completions.create(messages=HI, tools=[calc.schema], model="m")
    chunks, snapshot = await collect(streamed, tools=[calc.schema], model="m")
    assert fields(snapshot) == fields(completion)
    assert streamed.graph.turns[0].message.get("content") == whole.graph.turns[0].message.get("content")
    assert (streamed.graph.turns[0].output_ids == whole.graph.turns[0].output_ids).all()
    assert len({chunk.id for chunk in chunks}) == 1
    assert chunks[0].choices[0].delta.role == "assistant"
    for chunk in chunks:
        assert ChatCompletionChunk.model_validate(chunk.model_dump()) == chunk
    assert chunks[-1].choices[0].finish_reason == completion.choices[0].finish_reason
    assert chunks[-1].choices[0].model_extra == {"token_ids": streamed.graph.turns[0].output_ids.tolist()}


async def test_text_comes_in_several_pieces(client: Client, says: Says):
    says.script = ["<think>\none two three four\n</think>\n\nfive six seven eight"]
    chunks, _ = await collect(client)
    reasoning = [(chunk.choices[0].delta.model_extra or {}).get("reasoning_content") for chunk in chunks]
    assert len([text for text in reasoning if text]) > 1
    assert len([chunk for chunk in chunks if chunk.choices[0].delta.content]) > 1


async def test_usage_and_logprobs_come_when_asked_for(client: Client, says: Says):
    chunks, _ = await collect(client, stream_options={"include_usage": True}, logprobs=True)
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == len(client.graph.turns[0].output_ids)
    logprobs = chunks[-2].choices[0].logprobs
    assert logprobs is not None
    assert len(logprobs.content or []) == chunks[-1].usage.completion_tokens


async def test_a_stream_is_an_async_stream_and_can_be_rewarded_when_done(client: Client):
    stream = await client.chat.completions.create(messages=HI, stream=True)
    assert isinstance(stream, AsyncStream)
    assert isinstance(stream, ChatStream)
    async with stream:
        chunks = [chunk async for chunk in stream]
    client.reward(chunks[-1], 0.5)
    assert client.graph.turns[0].reward == 0.5
    with pytest.raises(StopAsyncIteration):
        await anext(stream)


@pytest.mark.parametrize("how", ["with", "close", "response"])
async def test_a_stream_left_early_records_nothing_and_aborts(make_client: Make, says: Says, how: str):
    client = make_client(max_turns=1)
    stream = await client.chat.completions.create(messages=HI, stream=True)
    match how:
        case "with":
            async with stream:
                async for _ in stream:
                    break
        case "close":
            await anext(stream)
            await stream.close()
        case _:
            await anext(stream)
            await stream.response.aclose()
    assert len(client.graph.turns) == 0
    assert says.aborted == 1
    await client.chat.completions.create(messages=HI)


async def test_a_stream_never_begun_leaves_nothing(make_client: Make, says: Says):
    client = make_client(max_turns=1)
    await client.chat.completions.create(messages=HI, stream=True)
    assert says.requests == []
    await client.chat.completions.create(messages=HI)


async def test_budgets_hold_for_streams(make_client: Make):
    client = make_client(max_turns=1)
    await collect(client)
    with pytest.raises(EpisodeLimit, match="1 of 1 turns"):
        await client.chat.completions.create(messages=HI, stream=True)


async def test_a_stream_that_waits_too_long_times_out(client: Client, says: Says):
    says.hold = anyio.Event()
    stream = await client.chat.completions.create(messages=HI, stream=True, timeout=0.01)
    with pytest.raises(CallTimeout):
        async for _ in stream:
            pass
    assert len(client.graph.turns) == 0
    assert says.aborted


async def test_an_aborted_or_empty_stream_is_an_error(client: Client, says: Says):
    says.script = [says.generation("half", StopReason.ABORT)]
    with pytest.raises(ServerUnavailable, match="aborted"):
        await collect(client)
    says.script = [says.generation("")]
    with pytest.raises(ReplyError):
        await collect(client)
    assert len(client.graph.turns) == 0


async def test_the_openai_stream_helper_works(client: Client, says: Says):
    says.script = ["It is 42."]
    async with client.chat.completions.stream(messages=HI, model="m") as stream:  # pyright: ignore
        kinds = [event.type async for event in stream]
        completion = await stream.get_final_completion()
    assert "content.delta" in kinds
    assert completion.choices[0].message.content == "It is 42."


@pytest.mark.parametrize("anyio_backend", ["asyncio"])  # trio does not run what is left of a dropped generator
async def test_a_stream_that_is_just_left_gives_its_turn_back_and_aborts(make_client: Make, says: Says):
    client = make_client(max_turns=1)
    async for _ in await client.chat.completions.create(messages=HI, stream=True):
        break
    assert client.episode.calls.in_flight == 0
    await client.chat.completions.create(messages=HI)
    assert len(client.graph.turns) == 1
    await anyio.wait_all_tasks_blocked()
    assert says.aborted == 1


async def test_a_stream_still_held_keeps_its_turn_and_the_refusal_says_so(make_client: Make):
    client = make_client(max_turns=1)
    stream = await client.chat.completions.create(messages=HI, stream=True)
    await anext(stream)
    with pytest.raises(EpisodeLimit, match=r"1 of 1 turns are spent, 1 of them running \(close a stream"):
        await client.chat.completions.create(messages=HI)
    await stream.close()
    await client.chat.completions.create(messages=HI)


@settings(max_examples=60, deadline=None)
@given(
    ids=st.lists(st.integers(0, 356) | st.integers(350, 356), min_size=1, max_size=40),
    tools=st.booleans(),
    stop=st.sampled_from([None, "e"]),
)
def test_any_ids_stream_as_they_parse(
    renderer: Renderer, tokenizer: Tokenizer, ids: list[int], tools: bool, stop: str | None
):
    streamed, whole = both_ways(renderer, tokenizer, ids, tools=[calc.schema] if tools else None, stop=stop)
    assert streamed == whole


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_byte_tokens_stream_as_they_parse(mistral: tuple[Renderer, Tokenizer], data: st.DataObject):
    renderer, tokenizer = mistral
    names = [f"<0x{byte:02X}>" for byte in (*"é🙂".encode(), *b"<think>", 0xFF)]
    byte_id = st.sampled_from([tokenizer.token_to_id(name) or 0 for name in names])
    ids = data.draw(st.lists(byte_id | st.integers(0, renderer.vocab_size - 1), min_size=1, max_size=12))
    streamed, whole = both_ways(renderer, tokenizer, ids, stop=data.draw(st.sampled_from([None, "e", "k"])))
    assert streamed == whole


def test_a_run_of_bytes_that_ends_wrong_streams_as_it_parses(mistral: tuple[Renderer, Tokenizer]):
    renderer, tokenizer = mistral
    ids = [tokenizer.token_to_id(name) or 0 for name in ("<0xC3>", "<0xA9>", "<0xFF>", "▁", "o", "</s>")]
    streamed, whole = both_ways(renderer, tokenizer, ids)
    assert streamed == whole
    assert streamed["content"] == "��� o"


class Contradicts(Says):
    """A backend whose first stream ends with another answer than it streamed."""

    @asynccontextmanager
    async def stream(self, request: GenerateRequest) -> AsyncGenerator[AsyncIterator[GenerationChunk], None]:
        streamed = np.array(self.ids("Hello there" if not self.requests else "Hello"), np.int32)

        async def chunks() -> AsyncGenerator[GenerationChunk, None]:
            yield GenerationChunk(output_ids=streamed)
            yield GenerationChunk(output_ids=np.empty(0, np.int32), generation=await self.generate(request))

        pieces = chunks()
        yield pieces
        await pieces.aclose()


async def test_a_stream_that_does_not_add_up_records_nothing(make_client: Make, tokenizer: Tokenizer):
    says = Contradicts(tokenizer)
    says.script = ["Hello you"]
    seen: list[Turn] = []
    client = make_client(backend=says, max_turns=1, on_turn=seen.append)
    with pytest.raises(TokenError, match="is not how the parsed message begins"):
        await collect(client)
    assert (len(client.graph.turns), seen) == (0, [])
    await collect(client)
    assert [turn.message["content"] for turn in client.graph.turns] == ["Hello you"]
    assert len(seen) == 1
