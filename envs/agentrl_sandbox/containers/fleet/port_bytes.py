"""The bytes of one connection over a web socket, in both directions; the text `END` says that one side sends no more."""

from __future__ import annotations

from contextlib import suppress
from typing import Final, Protocol

import aiohttp
import anyio
from anyio.abc import ByteStream, SocketStream

from agentrl.support.concurrency import task_group

END: Final = "end"
PING_S: Final = 20.0
"""Seconds between two signs of life of a connection."""


class WebSocket(Protocol):
    """Either end of a web socket of aiohttp."""

    async def receive(self) -> aiohttp.WSMessage: ...
    async def send_bytes(self, data: bytes) -> None: ...
    async def send_str(self, data: str) -> None: ...


async def carry_bytes(stream: SocketStream, socket: WebSocket) -> None:
    """Carry what either side sends to the other, until both have ended or one has gone."""
    with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError, OSError, aiohttp.ClientError):
        async with task_group() as tasks:
            tasks.start_soon(_to_socket, stream, socket)
            while True:
                message = await socket.receive()
                if message.type is aiohttp.WSMsgType.BINARY:
                    await stream.send(message.data)
                elif message.type is aiohttp.WSMsgType.TEXT and message.data == END:
                    await stream.send_eof()
                else:
                    tasks.cancel_scope.cancel()
                    return


async def _to_socket(stream: ByteStream, socket: WebSocket) -> None:
    with suppress(anyio.EndOfStream):
        while True:
            await socket.send_bytes(await stream.receive())
    await socket.send_str(END)
