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
