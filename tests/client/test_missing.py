"""An endpoint that answers 404: the error says what is missing there, and the fix."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from aiohttp import web
from openai import AsyncOpenAI

from agentrl.errors import RequestRejected
from tests.support.chat import HI
from tests.support.endpoints import endpoint_client


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def refusal(models: Sequence[str] | None, path: str = "/v1") -> str:
    """Return the error of a call at a server that lists `models` under /v1, or nothing, and answers no chat."""

    async def listed(request: web.Request) -> web.Response:
        entries = [{"id": name, "object": "model", "created": 1, "owned_by": "x"} for name in models or ()]
        return web.json_response({"object": "list", "data": entries})

    app = web.Application()
    if models is not None:
        app.router.add_get("/v1/models", listed)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        url = f"http://127.0.0.1:{runner.addresses[0][1]}{path}"
        async with AsyncOpenAI(base_url=url, api_key="k", max_retries=0) as connection:
            for stream in (False, True):
                client = endpoint_client(connection, model="mine")
                with pytest.raises(RequestRejected, match="answered 404") as error:
                    await client.chat.completions.create(messages=HI, stream=stream)
            assert error.value.status == 404
            return str(error.value).replace(url, "URL")
    finally:
        await runner.cleanup()


async def test_a_model_that_is_not_there_is_answered_with_those_that_are() -> None:
    assert "the endpoint has no model 'mine'; it offers a, b: name one of them" in await refusal(["a", "b"])
    assert "it offers none" in await refusal([])
    assert "a18, a19, ...: name" in await refusal([f"a{number}" for number in range(30)])


async def test_a_base_url_without_v1_or_with_the_whole_path_is_corrected() -> None:
    shown = await refusal(["mine"], "")
    assert "there is no URL/models either; most servers have the OpenAI API under /v1: try URL/v1" in shown
    shown = await refusal(None, "/v1/chat/completions")
    assert "must end before /chat/completions: try http://127.0.0.1:" in shown
    assert shown.endswith("/v1")
    assert "perhaps no server with the OpenAI API" in await refusal(None)


async def test_a_model_that_is_there_perhaps_serves_no_chat() -> None:
    assert "has the model 'mine', but no URL/chat/completions" in await refusal(["mine"])
