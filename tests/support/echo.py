"""A server of this machine that says what it hears, and a program that asks it."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from typing import NamedTuple

import anyio
from anyio.abc import SocketAttribute, SocketStream

ASK = """
import socket, sys
def ask(port, said, timeout=100):
    with socket.create_connection(("127.0.0.1", port), timeout) as made:
        made.sendall(said)
        made.shutdown(socket.SHUT_WR)
        heard = b""
        while piece := made.recv(65536):
            heard += piece
        return heard
"""


class Served(NamedTuple):
    """A server of this machine that says what it hears, and ends."""

    port: int
    connected: list[int]
    """One entry for each connection that is open."""


@asynccontextmanager
async def echo() -> AsyncGenerator[Served]:
    connected: list[int] = []

    async def answer(stream: SocketStream) -> None:
        connected.append(1)
        try:
            async with stream:
                with suppress(anyio.BrokenResourceError):  # the other end has gone
                    async for data in stream:
                        await stream.send(data)
        finally:
            connected.pop()

    async with await anyio.create_tcp_listener(local_host="127.0.0.1") as listener, anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, answer)
        yield Served(listener.extra(SocketAttribute.local_port), connected)
        tasks.cancel_scope.cancel()
