"""A real HTTP server at `/v1/chat/completions` whose answers a test writes, and an openai client connected to it."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import anyio
from aiohttp import web
from openai import AsyncOpenAI

from agentrl.client import Client, EndpointBackend, EpisodeSettings, SamplingConfig

Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def serving(answer: Answer) -> AsyncGenerator[AsyncOpenAI, None]:
    """Serve `answer` for the length of the block; needs the asyncio event loop."""
    app = web.Application()
    app.router.add_post("/v1/chat/completions", answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        async with AsyncOpenAI(base_url=url, api_key="k", max_retries=0) as connection:
            yield connection
    finally:
        await runner.cleanup()


async def streamed(request: web.Request, chunks: Iterable[Mapping[str, Any]]) -> web.StreamResponse:
    """Answer with a stream of chunks, ended as OpenAI ends it."""
    response = web.StreamResponse(headers={"content-type": "text/event-stream"})
    await response.prepare(request)
    for chunk in chunks:
        await response.write(f"data: {json.dumps(chunk)}\n\n".encode())
    await response.write(b"data: [DONE]\n\n")
    return response


class Endpoint:
    """An OpenAI-compatible server that answers as told."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.status = 200
        self.identity: str | None = None
        self.raw: bytes | None = None
        """What it answers instead of a completion: the body, of a stream or not."""
        self.hold: anyio.Event | None = None
        self.entered = anyio.Event()

    async def answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        self.entered.set()
        if self.hold is not None:
            await self.hold.wait()
        if self.status != 200:
            return web.json_response({"error": {"message": "told to fail"}}, status=self.status)
        if self.raw is not None:
            kind = "text/event-stream" if body.get("stream") else "application/json"
            return web.Response(body=self.raw, content_type=kind)
        head = {"id": self.identity or f"c{len(self.bodies)}", "created": 1, "model": body["model"]}
        usage = {"prompt_tokens": 7, "completion_tokens": 2, "total_tokens": 9}
        if not body.get("stream"):
            message = {"role": "assistant", "content": "Hello there"}
            choice = {"index": 0, "message": message, "finish_reason": "stop"}
            return web.json_response({**head, "object": "chat.completion", "choices": [choice], "usage": usage})
        head["object"] = "chat.completion.chunk"
        deltas = [({"role": "assistant", "content": "Hello"}, None), ({"content": " there"}, None), ({}, "stop")]
        choices = [{"index": 0, "delta": delta, "finish_reason": finish} for delta, finish in deltas]
        return await streamed(request, [{**head, "choices": [choice]} for choice in choices])


def endpoint_client(
    connection: AsyncOpenAI,
    *,
    model: str = "served",
    sampling: SamplingConfig | None = None,
    **options: Any,  # noqa: ANN401
) -> Client:
    settings = EpisodeSettings(**dict[str, Any](episode_id="e", task_id="t") | options)
    return Client(EndpointBackend(connection, model, settings, sampling=sampling))


class ToolEndpoint:
    """An OpenAI-compatible server whose model calls the tool `calc` with the first two numbers of a task, and then answers.

    Its streams come in small pieces; it holds each one after its first piece of text, until `release` is set.
    """

    def __init__(self, *, reasoning: str = "", identity: str | None = None) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.release = anyio.Event()
        self._reasoning, self._identity = reasoning, identity

    async def answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        results = [message["content"] for message in body["messages"] if message["role"] == "tool"]
        message: dict[str, Any] = {"role": "assistant", "content": f"It is {results[-1]}." if results else "I add."}
        if self._reasoning:
            message["reasoning_content"] = self._reasoning
        if not results:
            function = {"name": "calc", "arguments": '{"a": 2, "op": "+", "b": 3}'}
            message["tool_calls"] = [{"id": f"call_{len(self.bodies)}", "type": "function", "function": function}]
        finish = "stop" if results else "tool_calls"
        usage = {
            "prompt_tokens": 70,
            "completion_tokens": 9,
            "total_tokens": 79,
            "prompt_tokens_details": {"cached_tokens": 64},
        }
        identity = self._identity if self._identity is not None else f"chatcmpl-{len(self.bodies)}"
        head = {"id": identity, "created": 1, "model": body["model"]}
        if not body.get("stream"):
            choice = {"index": 0, "message": message, "finish_reason": finish}
            return web.json_response({**head, "object": "chat.completion", "choices": [choice], "usage": usage})
        head["object"] = "chat.completion.chunk"
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for number, delta in enumerate(_pieces(message)):
            choices = [{"index": 0, "delta": delta, "finish_reason": None}]
            await response.write(f"data: {json.dumps({**head, 'choices': choices})}\n\n".encode())
            if number == 1:
                await self.release.wait()
        last: list[dict[str, Any]] = [{"choices": [{"index": 0, "delta": {}, "finish_reason": finish}]}]
        if (body.get("stream_options") or {}).get("include_usage"):
            last.append({"choices": [], "usage": usage})
        for fields in last:
            await response.write(f"data: {json.dumps({**head, **fields})}\n\n".encode())
        await response.write(b"data: [DONE]\n\n")
        return response


def _pieces(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the deltas of an answer: text in pieces of three characters, and the arguments of calls in two."""
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    for name in ("reasoning_content", "content"):
        text = message.get(name, "")
        deltas += [{name: text[at : at + 3]} for at in range(0, len(text), 3)]
    for index, call in enumerate(message.get("tool_calls", [])):
        arguments = call["function"]["arguments"]
        deltas.append({"tool_calls": [{**call, "index": index, "function": {**call["function"], "arguments": ""}}]})
        for part in (arguments[:5], arguments[5:]):
            deltas.append({"tool_calls": [{"index": index, "function": {"arguments": part}}]})
    return deltas
