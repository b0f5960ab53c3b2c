"""Servers a client refuses when it connects."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from agentrl.errors import ReplyError, RequestRejected
from agentrl.inference.sglang.server import SGLangServer
from tests.support.endpoints import Endpoint, serving


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@asynccontextmanager
async def describing_itself(info: dict[str, Any]) -> AsyncGenerator[str]:
    """Serve `/server_info` and `/model_info`; yields the base URL."""

    async def server_info(_: web.Request) -> web.Response:
        return web.json_response(info)

    async def model_info(_: web.Request) -> web.Response:
        return web.json_response({"weight_version": "default"})

    app = web.Application()
    app.router.add_get("/server_info", server_info)
    app.router.add_get("/model_info", model_info)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def test_a_server_whose_streams_are_not_cumulative_is_refused() -> None:
    info = {"version": "0.5.23", "incremental_streaming_output": True}
    async with describing_itself(info) as url:
        with pytest.raises(ReplyError, match="got --incremental-streaming-output; start the server without it"):
            async with SGLangServer(url, vocab_size=10):
                pass
    info["incremental_streaming_output"] = False
    async with describing_itself(info) as url, SGLangServer(url, vocab_size=10) as server:
        assert server.version == 0


async def test_a_server_of_another_kind_is_named_with_the_url_to_set() -> None:
    async with serving(Endpoint().answer) as connection:
        url = str(connection.base_url).rstrip("/")
        with pytest.raises(RequestRejected, match=r"this server has no /server_info.*inference\.urls.*without /v1"):
            async with SGLangServer(url, vocab_size=10):
                pass
