"""Routes that no policy answers, at the door of an episode: they go to the endpoint that the run names."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import anyio
import openai
import pytest
from aiohttp import web

from agentrl.client import Client, DoorSettings, ReplayBackend, SideCalls
from agentrl.tokens.verify import verify
from agentrl.types import StopReason
from tests.support.doors import HI, door_client, scripted_client
from tests.support.endpoints import streamed

LARGE = 2**70
JSON = {"Content-Type": "application/json"}


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Others:
    """An endpoint of embeddings and of text completions."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str, dict[str, Any]]] = []
        self.entered, self.hold = anyio.Event(), False

    async def answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.seen.append((request.path, request.headers["Authorization"], body))
        self.entered.set()
        if self.hold:
            await anyio.sleep_forever()
        if body.get("input") == "too long":
            return web.json_response({"error": {"message": "at most 3 words"}}, status=413, headers={"Retry-After": "7"})
        head = {"object": "list", "model": body["model"]}
        if request.path.endswith("embeddings"):
            data = [{"object": "embedding", "index": 0, "embedding": [0.5, 1.0]}]
            return web.json_response({**head, "data": data, "usage": {"prompt_tokens": 1, "total_tokens": 1}})
        pieces = ["on", "ce"] if body.get("stream") else ["once"]
        found = [
            {
                **head,
                "id": "cmpl-1",
                "created": 1,
                "object": "text_completion",
                "choices": [{"index": 0, "text": text, "finish_reason": "stop", "logprobs": None}],
            }
            for text in pieces
        ]
        return await streamed(request, found) if body.get("stream") else web.json_response(found[0])


@asynccontextmanager
async def endpoint(others: Others) -> AsyncGenerator[str]:
    app = web.Application()
    app.router.add_post("/v1/{route:.+}", others.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    finally:
        await runner.cleanup()


def rule(url: str, **more: object) -> DoorSettings:
    return DoorSettings(side_calls=SideCalls.model_validate({"answer": {"base_url": url, "model": "small", **more}}))


async def test_embeddings_and_completions_are_those_of_the_endpoint_and_no_turns(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OTHER_KEY", "k2")
    client, policy = scripted_client(["five"])
    others = Others()
    async with (
        endpoint(others) as url,
        client.served(rule(url, embeddings="vectors", api_key_env="OTHER_KEY")) as door,
        door_client(door) as remote,
    ):
        found = await remote.embeddings.create(model="text-embedding-3-small", input="words", encoding_format="float")
        whole = await remote.completions.create(model="policy", prompt="Say once", extra_body={"seed": LARGE})
        parts = [
            part.choices[0].text
            async for part in await remote.completions.create(model="policy", prompt="Say once", stream=True)
        ]
        answer = await remote.chat.completions.create(model="policy", messages=HI)
        with pytest.raises(openai.APIStatusError) as caught:
            await remote.embeddings.create(model="m", input="too long", encoding_format="float")
    assert found.data[0].embedding == [0.5, 1.0]
    assert (whole.choices[0].text, parts) == ("once", ["on", "ce"])
    assert (caught.value.status_code, caught.value.response.headers["Retry-After"]) == (413, "7")
    assert "at most 3 words" in caught.value.message
    assert [(path, key, body["model"]) for path, key, body in others.seen] == [
        ("/v1/embeddings", "Bearer k2", "vectors"),
        ("/v1/completions", "Bearer k2", "small"),
        ("/v1/completions", "Bearer k2", "small"),
        ("/v1/embeddings", "Bearer k2", "vectors"),
    ]
    assert others.seen[1][2]["seed"] == LARGE
    assert answer.choices[0].message.content == "five"
    assert len(policy.calls) == 1
    trajectory = client.close(StopReason.COMPLETED, 1.0)
    verify(trajectory)
    assert (len(trajectory.turns), trajectory.turns[0].left_out) == (1, False)
    assert trajectory.metrics["gateway.passed_on.embeddings"] == 2.0
    assert trajectory.metrics["gateway.passed_on.completions"] == 2.0

    again = Client(ReplayBackend(trajectory))
    async with again.served(rule(url)) as door, door_client(door) as remote:
        with pytest.raises(openai.NotFoundError, match="replay"):
            await remote.embeddings.create(model="m", input="words", encoding_format="float")


@pytest.mark.parametrize("route", ["embeddings", "completions"])
@pytest.mark.parametrize("settings", [DoorSettings(), DoorSettings(side_calls=SideCalls(roles=("title",)))])
async def test_without_an_endpoint_the_error_names_the_remedy(route: str, settings: DoorSettings):
    client, policy = scripted_client(["five"])
    async with client.served(settings) as door, aiohttp.ClientSession() as http:
        async with http.post(f"{door.base_url}/{route}", json={"model": "m", "input": "x", "prompt": "x"}) as response:
            error = (await response.json())["error"]
        assert response.status == 404
        assert route in error["message"]
        assert "side_calls: {answer:" in error["message"]
        async with http.get(f"{door.base_url}/{route}") as response:
            assert response.status in (404, 405)
    assert not policy.calls


@pytest.mark.parametrize(("body", "status"), [(b"[1]", 400), (b"{", 400), (b'{"input": "x"}', 502)])
async def test_a_body_that_is_no_object_and_an_endpoint_that_is_down_are_errors_in_openais_shape(body: bytes, status: int):
    client, _ = scripted_client([])
    async with (
        client.served(rule("http://127.0.0.1:9/v1")) as door,
        aiohttp.ClientSession() as http,
        http.post(f"{door.base_url}/embeddings", data=body, headers=JSON) as response,
    ):
        said: Mapping[str, Any] = json.loads(await response.read())
    assert response.status == status
    assert said["error"]["message"]
    assert "127.0.0.1:9" not in said["error"]["message"]


async def test_a_request_that_still_runs_ends_with_the_door():
    client, _ = scripted_client([])
    neighbor, _ = scripted_client([])
    others = Others()
    others.hold = True
    statuses: list[int] = []
    async with (
        endpoint(others) as url,
        aiohttp.ClientSession() as http,
        neighbor.served(),  # whose server is the same one
        anyio.create_task_group() as tasks,
    ):

        async def ask(address: str) -> None:
            async with http.post(address, json={"input": "x"}) as response:
                statuses.append(response.status)

        async with client.served(rule(url)) as door:
            tasks.start_soon(ask, f"{door.base_url}/embeddings")
            await others.entered.wait()
    assert statuses == [410]
