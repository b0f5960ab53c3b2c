"""The way from a container's port to the run that it belongs to: a port of this machine, whose connections the run takes.

Invariant: each connection goes to one web socket and is closed with it. The end of a container closes those that no web
socket took.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import NamedTuple

import anyio
from aiohttp import web
from anyio.abc import SocketAttribute, SocketStream

from agentrl.support.concurrency import task_group
from agentrl_sandbox.containers.fleet.port_bytes import PING_S, carry_bytes

_MAX_WAITING = 64


class _CarriedConnection(NamedTuple):
    stream: SocketStream
    has_ended: anyio.Event


class PortCarrier:
    """Takes connections on `port` of this machine's loopback."""

    def __init__(self, port: int) -> None:
        self.port = port
        self._came, self._next = anyio.create_memory_object_stream[_CarriedConnection](_MAX_WAITING)

    async def accept(self, stream: SocketStream) -> None:
        """Hold a connection until a web socket has carried it."""
        connection = _CarriedConnection(stream, anyio.Event())
        async with stream:
            await self._came.send(connection)
            await connection.has_ended.wait()

    async def carry(self, request: web.Request) -> web.StreamResponse:
        """Wait for a connection, and carry it over the web socket that `request` asks for."""
        try:
            connection = await self._next.receive()
        except (anyio.EndOfStream, anyio.ClosedResourceError):
            raise web.HTTPNotFound(reason="the container has ended") from None
        try:
            socket = web.WebSocketResponse(heartbeat=PING_S, max_msg_size=0)
            await socket.prepare(request)
            await carry_bytes(connection.stream, socket)
            await socket.close()
            return socket
        finally:
            connection.has_ended.set()

    def close(self) -> None:
        """End every wait for a connection."""
        self._came.close()
        self._next.close()


@asynccontextmanager
async def open_carrier() -> AsyncGenerator[PortCarrier]:
    """Listen on a free port of this machine's loopback, and yield what carries its connections."""
    async with await anyio.create_tcp_listener(local_host="127.0.0.1") as listener:
        carrier = PortCarrier(listener.extra(SocketAttribute.local_port))
        try:
            async with task_group() as tasks:
                tasks.start_soon(listener.serve, carrier.accept)
                yield carrier
                tasks.cancel_scope.cancel()
        finally:
            carrier.close()
