"""Bad calls at a door: each gets the dialect's own refusal, and neither the episode nor another one is touched."""

from __future__ import annotations

import io
from typing import Any

import aiohttp
import anyio
import pytest

from agentrl.errors import InvariantError, WorkflowError
from agentrl.inference.backend import GenerateRequest, Generation
from agentrl.servers.scripted.server import ScriptedServer
from tests.support.doors import HI, client_of, scripted_client, scripted_server


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


BAD: list[Any] = [
    b"{",
    b"",
    b"[]",
    b"\xff\xfe",
    b"[" * 100_000,
    {"messages": 5},
    {"messages": [5]},
    {"messages": []},
    {"messages": [{"role": "emperor", "content": "x"}]},
    {"messages": [{"role": "user", "content": {"a": 1}}]},
    {"messages": [{"role": "assistant", "tool_calls": 5}]},
    {"messages": [{"role": "assistant", "tool_calls": [{"id": 5, "function": {"name": 5}}]}]},
    {"messages": HI, "temperature": "hot"},
    {"messages": HI, "tools": 5},
    {"messages": HI, "tools": [5]},
    {"messages": HI, "stop": {}},
    {"messages": HI, "n": 3},
    {"messages": HI, "stream": "yes"},
    {"messages": HI, "max_tokens": -1},
    {"messages": HI, "logit_bias": {"1": 5}},
    {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]},
]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_bad_call_is_refused_and_the_next_one_is_answered(stream: bool):
    client, policy = scripted_client(["fine"])
    async with client.served() as door, aiohttp.ClientSession() as http:
        for bad in BAD:
            fields: Any = {"data": bad, "headers": {"Content-Type": "application/json"}}
            if isinstance(bad, dict):
                fields = {"json": {"stream": stream, **bad}}
            async with http.post(f"{door.base_url}/chat/completions", **fields) as response:
                assert 400 <= response.status < 500, (bad, await response.text())
                assert (await response.json())["error"]["message"], bad
        assert not policy.calls
        async with http.post(f"{door.base_url}/chat/completions", json={"messages": HI, "unheard_of": 1}) as response:
            assert response.status in (200, 400), await response.text()
            if response.status == 400:
                assert "unheard_of" in await response.text()
        if not client.turns:
            async with http.post(f"{door.base_url}/chat/completions", json={"messages": HI}) as response:
                assert response.status == 200
    assert len(client.turns) == 1


async def test_a_large_body_a_wrong_method_an_unknown_path_and_a_wild_role_are_refused():
    client, policy = scripted_client(["fine"])
    async with client.served() as door, aiohttp.ClientSession() as http:
        url = f"{door.base_url}/chat/completions"
        headers = {"Content-Type": "application/json"}
        async with http.post(url, data=io.BytesIO(b" " * (33 * 2**20)), headers=headers) as response:
            assert response.status == 413
        async with http.get(url) as response:
            assert response.status == 405
        async with http.post(f"{door.base_url}/images/generations", json={}) as response:
            assert response.status == 404
            assert door.key not in await response.text()
        async with http.post(url, json={"messages": HI}, headers={"x-agentrl-role": "r" * 300}) as response:
            assert response.status == 400
        async with http.head(door.url) as response:
            assert response.status == 200
        async with http.get(f"{door.base_url}/models") as response:
            assert (await response.json())["data"][0]["id"] == "policy"
    assert not policy.calls


class _Contradicting(ScriptedServer):
    """A server whose replies contradict what was recorded."""

    async def generate(self, request: GenerateRequest) -> Generation:
        raise InvariantError("the record contradicts itself")


async def test_an_error_that_ends_the_run_is_raised_where_the_door_was_opened():
    server = scripted_server(["never"])
    server.__class__ = _Contradicting
    client = client_of(server)

    async def ask() -> None:
        async with client.served() as door, aiohttp.ClientSession() as http:
            await http.post(f"{door.base_url}/chat/completions", json={"messages": HI})

    with pytest.raises(InvariantError, match="contradicts"):
        await ask()
    assert not client.turns


def test_a_door_under_another_event_loop_than_that_of_asyncio_is_refused_by_name():
    client, _ = scripted_client([])

    async def open_door() -> None:
        async with client.served():
            pass

    with pytest.raises(WorkflowError, match="asyncio"):
        anyio.run(open_door, backend="trio")
