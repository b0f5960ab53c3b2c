"""Requests that no honest program sends: each gets its dialect's refusal, and no other episode and no log learns of it."""

from __future__ import annotations

import io
import json
import logging
import socket
from typing import Any

import aiohttp
import anyio
import pytest

from agentrl.client import Door
from agentrl.tokens.verify import verify
from agentrl.types import StopReason
from tests.support.doors import HI, scripted_client, until

DEADLINE_S = 300
CONFIDENTIAL = "the vault opens at nine"
ROUTES: dict[str, dict[str, Any]] = {
    "chat/completions": {"messages": HI},
    "responses": {"input": HI},
    "messages": {"messages": HI, "max_tokens": 100},
}


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def tool_of(route: str, name: str, schema: Any) -> dict[str, Any]:  # noqa: ANN401
    """Return a tool as the dialect of a route has it."""
    if route == "chat/completions":
        return {"type": "function", "function": {"name": name, "parameters": schema}}
    if route == "responses":
        return {"type": "function", "name": name, "parameters": schema}
    return {"name": name, "input_schema": schema}


def hostile_bodies(route: str) -> dict[str, bytes]:
    """Return bodies of a route that are to be refused, by what is wrong with them."""
    call, schema = {"model": "policy", **ROUTES[route]}, {"type": "object", "properties": {}}
    deep: dict[str, Any] = {}
    for _ in range(200):
        deep = {"properties": {"a": deep}}
    wrong = {
        "ten thousand tools": [tool_of(route, f"tool_{at}", schema) for at in range(10_000)],
        "a schema of 1 MB": [tool_of(route, "big", {**schema, "description": CONFIDENTIAL * 50_000})],
        "a deep schema": [tool_of(route, "deep", deep)],
    }
    return {
        **{why: json.dumps({**call, "tools": tools}).encode() for why, tools in wrong.items()},
        "half a body": json.dumps({**call, "user": CONFIDENTIAL}).encode()[:-20],
        "a lone surrogate": b'{"model": "policy", "messages": "\\ud800", "input": 5}',
        "a number too large": json.dumps({**call, "temperature": 1}).encode().replace(b": 1}", b": 1e999}"),
    }


@pytest.mark.parametrize("route", ROUTES)
async def test_a_hostile_body_is_refused_in_the_shape_of_its_dialect_and_is_in_no_log(
    route: str, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.DEBUG)
    client, policy = scripted_client(["fine"])
    other, _ = scripted_client(["fine, too"])
    async with client.served() as door, other.served() as beside, aiohttp.ClientSession() as http:

        async def post(at: Door, body: bytes) -> tuple[int, Any]:
            headers = {"Content-Type": "application/json"}
            async with http.post(f"{at.base_url}/{route}", data=io.BytesIO(body), headers=headers) as response:
                return response.status, await response.json()

        for why, body in hostile_bodies(route).items():
            status, refusal = await post(door, body)
            assert status == 400, (why, status, str(refusal)[:300])
            assert refusal["error"]["message"], why
            assert (refusal.get("type") == "error") == (route == "messages"), why
            assert len(str(refusal)) < 2000, f"{why}: the refusal repeats the body"
        assert not policy.calls
        good = json.dumps({"model": "policy", **ROUTES[route]}).encode()
        assert [(await post(at, good))[0] for at in (door, beside)] == [200, 200]
    assert [len(each.turns) for each in (client, other)] == [1, 1]
    said = caplog.text
    assert CONFIDENTIAL not in said
    assert door.key not in said


async def receive_by_hand(door: Door, head: bytes, body: bytes = b"") -> bytes:
    """Send a request as it is and return what comes back until the server closes or has answered."""
    host, _, port = door.server_url.removeprefix("http://").partition(":")
    data = b""
    async with await anyio.connect_tcp(host, int(port)) as stream:
        await stream.send(head + b"\r\n" + body)
        while b"\r\n\r\n" not in data:
            try:
                data += await stream.receive()
            except anyio.EndOfStream:
                break
    return data


@pytest.mark.parametrize(
    "header",
    [
        b"x-agentrl-role: a\x01b",
        b"x-agentrl-role: a\x00b",
        b"x-agentrl-player: \x7f",
        b"x-agentrl-role: a\nx-evil: b",
        b"x-agentrl-sample: " + b"s" * 100_000,
        b"Content-Length: -5",
        b"Transfer-Encoding: chunked, nonsense",
        b"Authorization: Bearer KEY\x01",
        b"x-api-key: KEY\x00",
    ],
)
async def test_control_characters_and_wild_lengths_in_headers_are_refused_and_the_server_goes_on(
    header: bytes, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.DEBUG)
    client, policy = scripted_client(["fine"])
    body = json.dumps({"model": "policy", "messages": HI}).encode()
    async with client.served() as door, aiohttp.ClientSession() as http:
        path = door.base_url.removeprefix(door.server_url)
        host = door.server_url.removeprefix("http://")
        lines = [f"POST {path}/chat/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n".encode()]
        lines += [header.replace(b"KEY", door.key.encode()), b"\r\n"]
        if b"Content-Length" not in header and b"Transfer" not in header:
            lines.append(b"Content-Length: %d\r\n" % len(body))
        with anyio.fail_after(DEADLINE_S):
            answer = await receive_by_hand(door, b"".join(lines), body)
        assert answer.split(b" ")[1].startswith(b"4"), answer[:300]
        assert door.key not in caplog.text
        assert not policy.calls
        async with http.post(f"{door.base_url}/chat/completions", json={"messages": HI}) as response:
            assert response.status == 200
    assert len(client.turns) == 1


@pytest.mark.parametrize("route", ROUTES)
async def test_a_stream_that_is_left_at_any_of_its_events_leaves_a_turn_of_what_came(route: str):
    reply = "It is 5, as ever."
    client, _ = scripted_client([reply] * 200)
    call = {"model": "policy", "stream": True, **ROUTES[route]}

    async def read_events(http: aiohttp.ClientSession, door: Door, sample: int, at_most: int) -> int:
        """Return how many events came; the connection is closed after `at_most`."""
        headers, count = {"x-agentrl-sample": str(sample)}, 0
        async with http.post(f"{door.base_url}/{route}", json=call, headers=headers) as response:
            assert response.status == 200
            while count < at_most and await response.content.readuntil(b"\n\n"):
                count += 1
            if count == at_most:
                response.close()
        return count

    async with client.served() as door, aiohttp.ClientSession() as http:
        with anyio.fail_after(DEADLINE_S):
            whole = await read_events(http, door, 0, 10_000)
            for at in range(whole):
                await read_events(http, door, at + 1, at)
            await until(lambda: not client.episode.calls.in_flight)
            assert await read_events(http, door, whole + 1, 10_000) == whole
    trajectory = client.close(StopReason.COMPLETED, 1.0)
    assert all(reply.startswith(turn.message["content"].rstrip()) for turn in trajectory.turns)
    assert {turn.message["content"] == reply for turn in trajectory.turns if turn.stop_reason is StopReason.STOP} == {True}
    assert 2 <= len(trajectory.turns) <= whole + 2
    verify(trajectory)


async def test_a_client_that_reads_nothing_holds_up_neither_its_own_record_nor_another_episode():
    text = ("word " * 2000).strip()
    client, _ = scripted_client([text])
    other, _ = scripted_client(["at once"])
    body = json.dumps({"model": "policy", "messages": HI, "stream": True}).encode()
    async with client.served() as door, other.served() as beside, aiohttp.ClientSession() as http:
        host, _, port = door.server_url.removeprefix("http://").partition(":")
        path = door.base_url.removeprefix(door.server_url)
        head = f"POST {path}/chat/completions HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Type: application/json\r\n"
        with anyio.fail_after(DEADLINE_S), socket.socket() as slow:
            slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            slow.connect((host, int(port)))
            slow.sendall(f"{head}Connection: close\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
            await until(lambda: client.turns)  # it has read nothing, and the answer is recorded
            async with http.post(f"{beside.base_url}/chat/completions", json={"messages": HI}) as response:
                assert response.status == 200
            received = await anyio.to_thread.run_sync(_all_of, slow)
        assert received.count(b"data: ") > 2000
        assert b"data: [DONE]" in received
    assert len(client.turns) == 1
    assert client.episode.turns[0].message["content"] == text


def _all_of(connection: socket.socket) -> bytes:
    return b"".join(iter(lambda: connection.recv(65536), b""))
