"""The web sockets that a run opens for the connections of a container to its port.

Invariant: each connection goes over one web socket, which is answered when the connection is there and closed with it.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import anyio
from aiohttp import web

from agentrl_sandbox.passage import MAX_CARRIED
from agentrl_sandbox.remote.socket_bytes import PING_S, SocketBytes, socket_bytes


@dataclass(slots=True, eq=False)
class _Wish:
    """A connection that wants a web socket."""

    socket: web.WebSocketResponse | None = None
    is_answered: anyio.Event = field(default_factory=anyio.Event)
    has_ended: anyio.Event = field(default_factory=anyio.Event)


class WaitingSockets:
    """Brings the connections of one container and the web sockets of its run together."""

    def __init__(self) -> None:
        self._wanted, self._wishes = anyio.create_memory_object_stream[_Wish](MAX_CARRIED)

    @asynccontextmanager
    async def connect(self) -> AsyncGenerator[SocketBytes]:
        """Yield the next web socket, as `agentrl_sandbox.passage.Way` needs it."""
        wish = _Wish()
        try:
            await self._wanted.send(wish)
            await wish.is_answered.wait()
            if wish.socket is None:
                raise ConnectionResetError("the run has gone")
            async with socket_bytes(wish.socket) as stream:
                yield stream
        finally:
            wish.has_ended.set()

    async def carry(self, request: web.Request) -> web.StreamResponse:
        """Wait for a connection, and let it go over the web socket that `request` asks for."""
        try:
            wish = await self._wishes.receive()
            while wish.has_ended.is_set():
                wish = await self._wishes.receive()
        except (anyio.EndOfStream, anyio.ClosedResourceError):
            raise web.HTTPNotFound(reason="the container has ended") from None
        socket = web.WebSocketResponse(heartbeat=PING_S, max_msg_size=0)
        try:
            await socket.prepare(request)
            wish.socket = socket
        finally:
            wish.is_answered.set()
        await wish.has_ended.wait()
        await socket.close()
        return socket

    def close(self) -> None:
        """End every wait for a connection."""
        self._wanted.close()
        self._wishes.close()
