"""The bytes of a connection over a web socket: all arrive, and an early end of the other side is noticed."""

from __future__ import annotations

import aiohttp
import anyio
import pytest

from agentrl_sandbox.passage import carry_bytes
from agentrl_sandbox.remote.socket_bytes import END, socket_bytes


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Messages:
    """A web socket that has these messages, and then is closed."""

    def __init__(self, *messages: bytes | str) -> None:
        kinds = {bytes: aiohttp.WSMsgType.BINARY, str: aiohttp.WSMsgType.TEXT}
        self._messages = [aiohttp.WSMessage(kinds[type(each)], each, None) for each in messages]
        self.sent: list[bytes | str] = []

    async def receive(self) -> aiohttp.WSMessage:
        await anyio.lowlevel.checkpoint()
        return self._messages.pop(0) if self._messages else aiohttp.WSMessage(aiohttp.WSMsgType.CLOSED, None, None)

    async def send_bytes(self, data: bytes) -> None:
        self.sent.append(data)

    async def send_str(self, data: str) -> None:
        self.sent.append(data)


class SlowEnd:
    """An end that takes long to read each piece, and answers once all have come."""

    def __init__(self) -> None:
        self.heard = b""
        self._all_came = anyio.Event()
        self._has_answered = False

    async def send(self, data: bytes) -> None:
        for _ in range(50):
            await anyio.lowlevel.checkpoint()
        self.heard += data

    async def send_eof(self) -> None:
        self._all_came.set()

    async def receive(self) -> bytes:
        await self._all_came.wait()
        if self._has_answered:
            raise anyio.EndOfStream
        self._has_answered = True
        return b"thanks"


async def test_all_that_came_before_the_end_arrives_though_the_other_side_has_gone_since() -> None:
    socket, end = Messages(b"a", b"b", b"c", END), SlowEnd()
    async with socket_bytes(socket) as carried:
        assert await carry_bytes(carried, end)
    assert (end.heard, socket.sent) == (b"abc", [b"thanks", END])


async def test_a_side_that_goes_before_its_end_is_an_error() -> None:
    with pytest.raises(ConnectionResetError):
        async with socket_bytes(Messages(b"a")) as carried:
            await carry_bytes(carried, SlowEnd())
