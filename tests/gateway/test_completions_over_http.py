"""`/v1/completions`: text and ids continued exactly, whole and streamed, scored and stopped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agentrl.tokens.renderer import Renderer
from tests.support.gateway import MODEL, Served, model_engine, script_engine, served


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def pieces(server: Served, **arguments: Any) -> list[Any]:  # noqa: ANN401
    return [piece async for piece in await server.openai.completions.create(model=MODEL, stream=True, **arguments)]


async def test_text_and_its_ids_are_continued_alike_whole_and_streamed(checkpoint: Path) -> None:
    ids = Renderer.load(checkpoint).encode_content("The answer")
    async with served(model_engine(checkpoint), checkpoint) as server:
        arguments: dict[str, Any] = {"temperature": 0, "max_tokens": 20}
        whole = await server.openai.completions.create(model=MODEL, prompt="The answer", **arguments)
        of_ids = await server.openai.completions.create(model=MODEL, prompt=ids, **arguments)
        batch = await server.openai.completions.create(model=MODEL, prompt=["You", "The answer"], **arguments)
        streamed = await pieces(server, prompt="The answer", stream_options={"include_usage": True}, **arguments)
        generated = await server.post(
            "/generate", {"input_ids": ids, "sampling_params": {"temperature": 0, "max_new_tokens": 20}}
        )
    assert whole.choices[0].text == of_ids.choices[0].text == batch.choices[1].text == generated[1]["text"]
    assert "".join(piece.choices[0].text for piece in streamed[:-1]) == whole.choices[0].text
    assert streamed[-1].usage == whole.usage == of_ids.usage
    assert whole.usage is not None
    assert (whole.usage.prompt_tokens, whole.object, whole.choices[0].finish_reason) == (
        len(ids),
        "text_completion",
        generated[1]["meta_info"]["finish_reason"]["type"],
    )


async def test_a_stop_string_is_in_no_piece_of_a_stream(checkpoint: Path) -> None:
    async with served(script_engine(checkpoint, lambda _: "one two three"), checkpoint) as server:
        arguments: dict[str, Any] = {"prompt": [5], "stop": [" thr", "zzzz"]}
        whole = await server.openai.completions.create(model=MODEL, **arguments)
        streamed = await pieces(server, **arguments)
    assert whole.choices[0].text == "one two" == "".join(piece.choices[0].text for piece in streamed)
    assert streamed[-1].choices[0].finish_reason == whole.choices[0].finish_reason == "stop"


async def test_a_prompt_is_scored_without_sampling_and_its_log_probs_are_those_of_generate(checkpoint: Path) -> None:
    async with served(model_engine(checkpoint), checkpoint) as server:
        scored = await server.openai.completions.create(model=MODEL, prompt="The sum", echo=True, logprobs=0, max_tokens=0)
        body = {"text": "The sum", "return_logprob": True, "logprob_start_len": 0, "sampling_params": {"max_new_tokens": 0}}
        generated = (await server.post("/generate", body))[1]["meta_info"]["input_token_logprobs"]
    choice = scored.choices[0]
    assert choice.text == "The sum"
    assert choice.logprobs is not None
    assert choice.logprobs.token_logprobs == [entry[0] for entry in generated]
    assert "".join(choice.logprobs.tokens or ()) == "The sum"
    assert choice.logprobs.text_offset == [
        sum(map(len, (choice.logprobs.tokens or [])[:at])) for at in range(len(generated))
    ]


async def test_choices_repeat_with_a_seed_and_log_probs_come_with_their_tokens(checkpoint: Path) -> None:
    async with served(model_engine(checkpoint), checkpoint) as server:
        arguments: dict[str, Any] = {"prompt": "x", "n": 2, "seed": 3, "logprobs": 0, "max_tokens": 9}
        first, second = [await server.openai.completions.create(model=MODEL, **arguments) for _ in range(2)]
        streamed = await pieces(server, **arguments)
    assert [choice.text for choice in first.choices] == [choice.text for choice in second.choices]
    assert first.choices[0].text != first.choices[1].text
    for choice in first.choices:
        same = [piece.choices[0] for piece in streamed if piece.choices[0].index == choice.index]
        assert "".join(piece.text for piece in same) == choice.text
        assert choice.logprobs is not None
        assert [number for piece in same for number in piece.logprobs.token_logprobs] == choice.logprobs.token_logprobs


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({}, "prompt"),
    ({"prompt": ""}, "empty"),
    ({"prompt": [[5], "x"]}, "prompt must be text, token ids, or a list of either"),
    ({"prompt": [99999]}, "outside the vocabulary"),
    ({"prompt": [5], "suffix": "x"}, "suffix is not served"),
    ({"prompt": [5], "logprobs": 2}, "logprobs must be 0"),
    ({"prompt": [5], "echo": True, "stream": True}, "echo must be"),
    ({"prompt": [5], "best_of": 4}, "best_of must be n"),
    ({"prompt": [5], "max_tokens": 0}, "max_tokens must be"),
    ({"prompt": [5], "max_tokens": 99999}, "over the context"),
    ({"prompt": [5], "model": "gpt"}, "no model 'gpt'"),
]


async def test_what_cannot_be_continued_is_refused_by_name(checkpoint: Path) -> None:
    async with served(model_engine(checkpoint), checkpoint) as server:
        for body, message in REFUSED:
            status, _, text = await server.error("/v1/completions", body)
            assert status == (404 if "model" in body else 400), text
            assert message in text
