"""Workers on other nodes: they connect to the driver over TCP, and a token shows which worker connects.

Invariant: a connection without the token of a worker that is expected is closed, and nothing that it sent is read as a
message. A token is used once.
"""

from __future__ import annotations

import secrets
import socket
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from typing import Self

import anyio
from anyio.abc import SocketAttribute, SocketStream

from agentrl.concurrency import task_group
from agentrl.errors import ConfigError

TOKEN_BYTES = 64
"""Hexadecimal digits of a token."""
WORKER_TOKEN_VARIABLE = "AGENTRL_ROLLOUT_TOKEN"
"""Environment variable with the token of a worker."""
_PROVE_S = 10.0
"""Seconds that a connection has to send its token."""


class JoinPoint:
    """The address at which workers join."""

    def __init__(self, host: str, port: int) -> None:
        """Expect no worker yet; `listening` makes one."""
        self.host, self.port = host, port
        self._expected: dict[str, anyio.Event] = {}
        self._joined: dict[str, SocketStream] = {}

    @classmethod
    @asynccontextmanager
    async def listening(cls, host: str) -> AsyncGenerator[Self]:
        """Yield the address while the block runs: `host`, and any free port.

        Raises:
            ConfigError: this machine does not have the address.

        Cancellation: the address is closed.
        """
        try:
            listener = await anyio.create_tcp_listener(local_host=host, local_port=0)
        except OSError as error:
            raise ConfigError(
                f"cluster.listen: cannot listen at {host}: {error}; give an address of this machine"
            ) from error
        async with listener, task_group() as tasks:
            point = cls(host, listener.extra(SocketAttribute.local_port))
            tasks.start_soon(listener.serve, point._admit, name="agentrl.remote")
            yield point
            tasks.cancel_scope.cancel()

    def expect(self) -> str:
        """Return the token by which one more worker can join."""
        token = secrets.token_hex(TOKEN_BYTES // 2)
        self._expected[token] = anyio.Event()
        return token

    async def joined(self, token: str) -> SocketStream:
        """Wait for the worker with `token`, and return its connection.

        Cancellation: the worker can no longer join.
        """
        try:
            await self._expected[token].wait()
        finally:
            del self._expected[token]
        return self._joined.pop(token)

    async def _admit(self, stream: SocketStream) -> None:
        given = bytearray()
        with anyio.move_on_after(_PROVE_S), suppress(anyio.EndOfStream, anyio.BrokenResourceError):
            while len(given) < TOKEN_BYTES:
                given += await stream.receive(TOKEN_BYTES - len(given))
        for token, arrived in self._expected.items():
            if secrets.compare_digest(token.encode(), bytes(given)) and not arrived.is_set():
                stream.extra(SocketAttribute.raw_socket).setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                self._joined[token] = stream
                arrived.set()
                return
        with anyio.move_on_after(1.0, shield=True):
            await stream.aclose()


def connect_to_driver(address: str, token: str) -> socket.socket:
    """Return a connection to the driver at `address`, HOST:PORT, over which the token is sent.

    Raises:
        OSError: nothing answers there.
    """
    host, _, port = address.rpartition(":")
    connection = socket.create_connection((host.strip("[]"), int(port)), timeout=60.0)
    connection.settimeout(None)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.sendall(token.encode())
    return connection
