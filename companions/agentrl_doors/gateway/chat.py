"""`/v1/chat/completions`: one call, answered by the client of an episode that ends with it.

Invariant: each choice is what the client of a workflow returns for the same messages on the same weights: same prompt ids,
same parsing, same pieces of a stream. A call leaves nothing behind.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, cast
from uuid import uuid4

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from agentrl.client import ChatStream, Client, EpisodeSettings, PolicyBackend, SamplingConfig
from agentrl.errors import AgentRLError
from agentrl.inference.backend import CONTEXT_HEADROOM
from agentrl.servers.engine import InferenceEngine
from agentrl.support.concurrency import task_group
from agentrl.tokens.renderer import Renderer
from agentrl.types import Message
from agentrl_doors.gateway.backend import EngineBackend
from agentrl_doors.gateway.body import CallRefused, OpenAICall, with_seed

Json = dict[str, Any]


class ChatCalls:
    """Answers chat calls.

    Args:
        engine: samples the tokens.
        renderer: chat template and tokenizer of its model.
        sampling: the default of each sampling argument that a call leaves out.
    """

    def __init__(self, engine: InferenceEngine, renderer: Renderer, sampling: SamplingConfig) -> None:
        self._engine = engine
        self._renderer = renderer.within(engine.info.max_context_tokens - CONTEXT_HEADROOM)
        self._sampling = sampling

    async def complete(self, body: OpenAICall) -> Json:
        """Return the completion of a call, all choices in one object.

        Cancellation: aborts every choice.
        """
        messages, arguments, backend = _messages(body), body.arguments(), self._backend(body)
        found: dict[int, ChatCompletion] = {}

        async def sample(choice: int) -> None:
            create = self._client(backend).chat.completions.create
            found[choice] = await create(messages=messages, model=body.model, **with_seed(arguments, choice))

        async with task_group() as tasks:
            for choice in range(body.n):
                tasks.start_soon(sample, choice)
        return _one_completion([_wire_fields(found[choice], body) for choice in range(body.n)])

    @asynccontextmanager
    async def stream(self, body: OpenAICall) -> AsyncGenerator[AsyncIterator[Json]]:
        """Yield the chunks of a call, those of several choices as they come; leaving the block early aborts them."""
        messages, arguments = _messages(body), {**body.arguments(), "stream_options": {"include_usage": True}}
        backend = self._backend(body)
        streams: list[ChatStream] = []
        for choice in range(body.n):
            create = self._client(backend).chat.completions.create
            made = await create(messages=messages, model=body.model, stream=True, **with_seed(arguments, choice))
            streams.append(cast("ChatStream", made))
        send, receive = anyio.create_memory_object_stream[Json | AgentRLError]()
        identity = streams[0].id
        async with task_group() as tasks, receive:
            async with send:
                for choice, stream in enumerate(streams):
                    tasks.start_soon(_forward_chunks, stream, choice, body, identity, send.clone())
            try:
                yield _chunk_events(receive, include_usage=body.include_usage)
            finally:
                # An engine that steps in this event loop wakes the tasks before each step, and a task that is awake takes no
                # cancellation: without this it would sample to the end.
                backend.abort()
                tasks.cancel_scope.cancel()

    def _backend(self, body: OpenAICall) -> EngineBackend:
        return EngineBackend(self._engine, body.server_sampling)

    def _client(self, backend: EngineBackend) -> Client:
        settings = EpisodeSettings(episode_id=uuid4().hex, task_id="")
        return Client(PolicyBackend(backend, self._renderer, self._sampling, settings, counts_misses=False))


async def _forward_chunks(
    stream: ChatStream, choice: int, body: OpenAICall, identity: str, send: MemoryObjectSendStream[Json | AgentRLError]
) -> None:
    """Send the chunks of one choice, and an error in place of the next chunk."""
    async with send, stream:
        with suppress(anyio.BrokenResourceError):  # the call was left
            try:
                async for chunk in stream:
                    plain = _wire_fields(chunk, body)
                    for each in plain["choices"]:
                        each["index"] = choice
                    await send.send({**plain, "id": identity})
            except AgentRLError as error:
                await send.send(error)


async def _chunk_events(
    chunks: MemoryObjectReceiveStream[Json | AgentRLError], *, include_usage: bool
) -> AsyncGenerator[Json]:
    """Yield chunks; those with the usage of one choice become one at the end, where the call wants it."""
    usages: list[Json] = []
    last: Json = {}
    async for chunk in chunks:
        if isinstance(chunk, AgentRLError):
            raise chunk
        if chunk["choices"]:
            yield chunk
        else:
            last = chunk
            usages.append(chunk["usage"])
    if include_usage:
        yield {**last, "usage": _usage_of_choices(usages)}


def _messages(body: OpenAICall) -> list[Message]:
    messages = body.rest.get("messages")
    if not isinstance(messages, list):
        raise CallRefused(f"messages must be a list of messages, got {messages!r:.80}")
    return cast("list[Message]", messages)


def _wire_fields(value: ChatCompletion | ChatCompletionChunk, body: OpenAICall) -> Json:
    """Return a completion or chunk as JSON values; ids of tokens only where the call has `return_token_ids`."""
    plain = value.model_dump(mode="json", exclude_unset=True)
    if not body.rest.get("return_token_ids"):
        for choice in plain["choices"]:
            choice.pop("token_ids", None)
    return plain


def _one_completion(completions: Sequence[Json]) -> Json:
    """Return one completion with the choices of all."""
    choices = [{**each["choices"][0], "index": index} for index, each in enumerate(completions)]
    return {**completions[0], "choices": choices, "usage": _usage_of_choices([each["usage"] for each in completions])}


def _usage_of_choices(usages: Sequence[Mapping[str, Any]]) -> Json:
    """Return the usage of all choices: the prompt counts once, as at OpenAI."""
    sampled = sum(each["completion_tokens"] for each in usages)
    prompt = usages[0]["prompt_tokens"]
    return {**usages[0], "completion_tokens": sampled, "total_tokens": prompt + sampled}
