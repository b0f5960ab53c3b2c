"""A renderer, a backend that says what it is told, and clients on them."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import numpy as np
import pytest
from tokenizers import Tokenizer

from agentrl.client import Client, EpisodeSettings, PolicyBackend, SamplingConfig
from agentrl.inference.backend import GenerateRequest, Generation, GenerationChunk
from agentrl.tokens.renderer import Renderer
from agentrl.types import StopReason, VersionSpan

OF_BACKEND = ("sampling", "max_context_tokens", "seed", "counts_misses")


class Says:
    """A backend that samples the given texts in turn, the last one for ever; a callable may look at the request."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.requests: list[GenerateRequest] = []
        self.script: list[str | Generation | Callable[[GenerateRequest], Generation]] = ["Hello there"]
        self.hold: anyio.Event | None = None
        """While set and not fired, calls wait for it."""
        self.entered = anyio.Event()
        self.aborted = 0

    def ids(self, text: str) -> list[int]:
        """Token ids of text in which markup counts as control tokens, as a model would sample it."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def text(self, request: GenerateRequest) -> str:
        return self._tokenizer.decode(request.input_ids.tolist(), skip_special_tokens=False)

    def generation(self, text: str, stop_reason: StopReason = StopReason.STOP, **fields: Any) -> Generation:  # noqa: ANN401
        ids = np.array(self.ids(text), np.int32)
        logprobs = -np.linspace(0.1, 1.0, len(ids), dtype=np.float32) if len(ids) else np.empty(0, np.float32)
        spans = (VersionSpan(start=0, end=len(ids), version=3),) if len(ids) else ()
        return Generation(output_ids=ids, output_logprobs=logprobs, spans=spans, stop_reason=stop_reason, **fields)

    def whole(self, text: str) -> Generation:
        """A finished answer, its end-of-turn token included."""
        end = self._tokenizer.token_to_id("<|im_end|>")
        return self.generation(text + "<|im_end|>", matched_stop=end)

    async def generate(self, request: GenerateRequest) -> Generation:
        self.requests.append(request)
        entry = self.script.pop(0) if len(self.script) > 1 else self.script[0]
        try:
            await anyio.lowlevel.checkpoint()
            self.entered.set()
            if self.hold is not None:
                await self.hold.wait()
        except anyio.get_cancelled_exc_class():
            self.aborted += 1
            raise
        if isinstance(entry, str):
            return self.whole(entry)
        return entry(request) if callable(entry) else entry

    @asynccontextmanager
    async def stream(self, request: GenerateRequest) -> AsyncGenerator[AsyncIterator[GenerationChunk], None]:
        finished = False

        async def chunks() -> AsyncGenerator[GenerationChunk, None]:
            nonlocal finished
            generation = await self.generate(request)
            for at in range(0, len(generation.output_ids) - 1, 2):
                await anyio.lowlevel.checkpoint()
                yield GenerationChunk(output_ids=generation.output_ids[at : at + 2])
            finished = True
            yield GenerationChunk(output_ids=generation.output_ids[-1:], generation=generation)

        pieces = chunks()
        try:
            yield pieces
        finally:
            await pieces.aclose()
            self.aborted += not finished


@pytest.fixture(scope="session")
def renderer(checkpoint: Path) -> Renderer:
    return Renderer.load(checkpoint)


@pytest.fixture(scope="session")
def tokenizer(checkpoint: Path) -> Tokenizer:
    return Tokenizer.from_file(str(checkpoint / "tokenizer.json"))


@pytest.fixture
def says(tokenizer: Tokenizer) -> Says:
    return Says(tokenizer)


@pytest.fixture
def make_client(renderer: Renderer, says: Says) -> Callable[..., Client]:
    def make(**options: Any) -> Client:  # noqa: ANN401
        options.setdefault("sampling", SamplingConfig(max_tokens=200))
        inference = options.pop("backend", says)
        of_backend = {name: options.pop(name) for name in OF_BACKEND if name in options}
        settings = EpisodeSettings(**dict[str, Any](episode_id="e1", task_id="t1") | options)
        return Client(PolicyBackend(inference, renderer, settings=settings, **of_backend))

    return make


@pytest.fixture
def client(make_client: Callable[..., Client]) -> Client:
    return make_client()
