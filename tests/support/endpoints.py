"""A real HTTP server at `/v1/chat/completions` whose answers a test writes, and an openai client connected to it."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web
from openai import AsyncOpenAI

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
