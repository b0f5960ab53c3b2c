"""A TCP proxy in front of one server, which can become slow, wrong, silent or unreachable.

Invariant: `mode` counts for connections that are open as well as for new ones.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Literal, TypeAlias, get_args

import anyio
from anyio.abc import ByteStream, SocketAttribute, SocketStream

from agentrl.support.concurrency import task_group

Mode: TypeAlias = Literal["pass", "slow", "wrong", "silent", "partition"]
MODES: tuple[Mode, ...] = get_args(Mode)
SLOW_S = 1.0
"""Seconds by which a slow server's every reply is late."""
NONSENSE = b'HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 20\r\n\r\n{"text": "yes, yes"}'


class Proxy:
    """Forwards connections to `port`; `url` is its own address."""

    def __init__(self, port: int) -> None:
        """Forward to `port` of this machine."""
        self._port = port
        self._streams: set[SocketStream] = set()
        self.mode: Mode = "pass"
        self.url = ""

    async def set_mode(self, mode: Mode) -> None:
        """Change the mode; a partition drops the open connections."""
        self.mode = mode
        if mode == "partition":
            for stream in list(self._streams):
                await anyio.aclose_forcefully(stream)

    async def handle(self, client: SocketStream) -> None:
        """Forward one connection until either side closes it."""
        if self.mode == "partition":
            await anyio.aclose_forcefully(client)
            return
        self._streams.add(client)
        try:
            async with client, await anyio.connect_tcp("127.0.0.1", self._port) as server, anyio.create_task_group() as both:
                both.start_soon(self._forward, client, server, False, both.cancel_scope)
                both.start_soon(self._forward, server, client, True, both.cancel_scope)
        finally:
            self._streams.discard(client)

    async def _forward(self, source: ByteStream, target: ByteStream, replies: bool, scope: anyio.CancelScope) -> None:
        try:
            async for data in source:
                if replies and self.mode == "silent":
                    continue
                if replies and self.mode == "wrong":
                    await target.send(NONSENSE)
                    break
                if replies and self.mode == "slow":
                    await anyio.sleep(SLOW_S)
                await target.send(data)
        except (anyio.BrokenResourceError, anyio.ClosedResourceError):
            pass  # the other side is gone, and so is this connection
        scope.cancel()


@asynccontextmanager
async def open_proxy(port: int) -> AsyncGenerator[Proxy]:
    """Run a proxy to `port` while the block runs."""
    proxy = Proxy(port)
    listener = await anyio.create_tcp_listener(local_host="127.0.0.1")
    async with listener, task_group() as tasks:
        own: object = listener.extra(SocketAttribute.local_port)
        proxy.url = f"http://127.0.0.1:{own}"
        tasks.start_soon(listener.serve, proxy.handle)
        yield proxy
        tasks.cancel_scope.cancel()
