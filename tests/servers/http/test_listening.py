"""The end of a server: no connection outlives it."""

from __future__ import annotations

import socket
from contextlib import closing, suppress
from urllib.parse import urlsplit

import anyio.lowlevel
import pytest
from aiohttp import web

from agentrl.servers.listening import Connections, listening


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def connected(url: str) -> socket.socket:
    place = urlsplit(url)
    return socket.create_connection((place.hostname, place.port))


def is_closed(channel: socket.socket) -> bool:
    channel.setblocking(False)
    try:
        return channel.recv(1) == b""
    except ConnectionResetError:
        return True
    except BlockingIOError:
        return False


@pytest.mark.parametrize("passes", range(6))
async def test_a_connection_that_arrives_while_a_server_ends_is_closed(passes: int) -> None:
    connections = Connections()
    async with listening(web.Application(), connections, host="127.0.0.1", port=0, api_key=None) as url:
        channel = connected(url)
        for _ in range(passes):  # of the event loop, which accepts it meanwhile
            await anyio.lowlevel.checkpoint()
    with closing(channel):
        assert is_closed(channel)


async def test_a_client_that_reads_nothing_does_not_keep_its_connection() -> None:
    entered = anyio.Event()

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        entered.set()
        while True:
            await response.write(bytes(1 << 20))

    app = web.Application()
    app.router.add_get("/", answer)
    connections = Connections()
    async with listening(app, connections, host="127.0.0.1", port=0, api_key=None) as url:
        channel = connected(url)
        channel.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        await entered.wait()
    with closing(channel):
        channel.settimeout(60)
        with suppress(ConnectionResetError):
            while channel.recv(1 << 20):  # what the machine holds, and then the end
                pass
