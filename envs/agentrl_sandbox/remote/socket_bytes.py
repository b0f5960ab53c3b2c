"""The bytes of one connection over a web socket, in both directions; the text `END` says that one side sends no more."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Final, Protocol

import aiohttp
import anyio
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from agentrl.support.concurrency import task_group

END: Final = "end"
PING_S: Final = 20.0
"""Seconds between two signs of life of a connection."""


class WebSocket(Protocol):
    """Either end of a web socket of aiohttp."""

    async def receive(self) -> aiohttp.WSMessage: ...
    async def send_bytes(self, data: bytes) -> None: ...
    async def send_str(self, data: str) -> None: ...


class SocketBytes:
    """The bytes of a web socket, an `agentrl_sandbox.passage.ByteWay`."""

    def __init__(self, socket: WebSocket, came: MemoryObjectReceiveStream[bytes]) -> None:
        self._socket = socket
        self.receive = came.receive

    async def send(self, data: bytes) -> None:
        """Send bytes; a connection that is lost is an OSError."""
        await self._socket.send_bytes(data)

    async def send_eof(self) -> None:
        """Say that this side sends no more."""
        await self._socket.send_str(END)


@asynccontextmanager
async def socket_bytes(socket: WebSocket) -> AsyncGenerator[SocketBytes]:
    """Yield the bytes of a web socket, which is read to its end, so that signs of life are answered.

    Raises:
        ConnectionError: the other side has gone before it had sent all.
    """
    coming, came = anyio.create_memory_object_stream[bytes]()
    async with coming, came, task_group() as tasks:
        tasks.start_soon(_read, socket, coming)
        yield SocketBytes(socket, came)
        tasks.cancel_scope.cancel()


async def _read(socket: WebSocket, coming: MemoryObjectSendStream[bytes]) -> None:
    has_ended = False
    while True:
        message = await socket.receive()
        if message.type is aiohttp.WSMsgType.BINARY and not has_ended:
            await coming.send(message.data)
        elif message.type is aiohttp.WSMsgType.TEXT and message.data == END:
            coming.close()
            has_ended = True
        elif has_ended:
            return  # what it sent may still be on its way to the other end
        else:
            raise ConnectionResetError("the other side of a web socket has gone")
