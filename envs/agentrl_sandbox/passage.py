"""One way out of a box: a port of its own loopback, which leads to a port of this machine, or wherever else it is carried.

Invariant: the box keeps its own network, which has nothing but a loopback. Its first process makes the listening socket,
gives it to this process and then becomes the supervisor; what comes in is carried from outside, to one place and no other.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager, contextmanager, suppress
from functools import partial
from typing import Final, NamedTuple, Protocol, TypeAlias

import anyio
from anyio.abc import SocketStream

from agentrl.errors import EnvironmentFault
from agentrl.support.concurrency import task_group


class ByteWay(Protocol):
    """One end of a connection."""

    async def receive(self) -> bytes:
        """Return what comes next; anyio.EndOfStream: the other side sends no more."""
        ...

    async def send(self, data: bytes, /) -> None:
        """Send all of it."""
        ...

    async def send_eof(self) -> None:
        """Say that this side sends no more."""
        ...


class Way(NamedTuple):
    """A port of a box, and how each of its connections goes on."""

    port: int
    connect: Callable[[], AbstractAsyncContextManager[ByteWay]]
    """Opens the other end; one that cannot be opened is an OSError."""


Port: TypeAlias = int | tuple[int, int] | Way
"""A port of this machine, which the box has under the same number; the box's own and the one of this machine; or a way."""
MAX_CARRIED: Final = 64
"""Connections of one box at a time; further ones wait."""
_FULL_S: Final = 0.1
"""Seconds until the next try while this process has no descriptor left."""
_LISTEN: Final = """
import os, socket, sys
channel = socket.socket(fileno=int(sys.argv[1]))
listener = socket.create_server(("127.0.0.1", int(sys.argv[2])), backlog=64)
socket.send_fds(channel, [b"l"], [listener.fileno()])
channel.close()
listener.close()
os.execv(sys.argv[3], sys.argv[3:])
"""


def way_to(port: Port) -> Way:
    """Return the port of the box, and the way from there."""
    if isinstance(port, Way):
        return port
    inner, outer = (port, port) if isinstance(port, int) else port
    return Way(inner, partial(_connected, outer))


@asynccontextmanager
async def _connected(port: int) -> AsyncGenerator[SocketStream]:
    async with await anyio.connect_tcp("127.0.0.1", port) as stream:
        yield stream


async def carry_bytes(one: ByteWay, other: ByteWay) -> bool:
    """Carry what either end sends to the other, until both have ended; False: one has gone before that."""
    with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError, OSError):
        async with task_group() as tasks:
            tasks.start_soon(_carry_one_way, one, other)
            await _carry_one_way(other, one)
        return True
    return False


async def _carry_one_way(source: ByteWay, target: ByteWay) -> None:
    with suppress(anyio.EndOfStream):
        while True:
            await target.send(await source.receive())
    await target.send_eof()


class Passage:
    """The way out of one box."""

    def __init__(self, way: Way, channel: socket.socket, theirs: socket.socket) -> None:
        self._way, self._channel, self._theirs = way, channel, theirs
        self._slots = anyio.Semaphore(MAX_CARRIED)

    @property
    def descriptor(self) -> int:
        """The descriptor that the box has to inherit."""
        return self._theirs.fileno()

    def before(self, command: tuple[str, ...]) -> tuple[str, ...]:
        """Return a command that makes the listening socket and becomes `command`, whose first word is a Python."""
        return (command[0], "-I", "-S", "-B", "-c", _LISTEN, str(self.descriptor), str(self._way.port), *command)

    async def carry(self) -> None:
        """Take the listening socket, and carry what comes in until cancelled."""
        self._theirs.close()
        await anyio.wait_readable(self._channel)
        _, descriptors, _, _ = socket.recv_fds(self._channel, 1, 1)
        if not descriptors:
            raise EnvironmentFault("sandbox: its first process made no listening socket for the way to the model")
        with socket.socket(fileno=descriptors[0]) as listener:
            listener.setblocking(False)
            async with task_group() as tasks:
                while True:
                    await self._slots.acquire()
                    tasks.start_soon(self._connection, await _accepted(listener))

    async def _connection(self, accepted: socket.socket) -> None:
        try:
            with accepted, suppress(OSError):
                async with await _stream_of(accepted) as inner, self._way.connect() as outer:
                    await carry_bytes(inner, outer)
        finally:
            self._slots.release()


@contextmanager
def open_passage(port: Port) -> Generator[Passage]:
    """Yield a way for one box out of a port of its loopback."""
    with ExitStack() as stack:
        channel, theirs = (stack.enter_context(end) for end in socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        channel.setblocking(False)
        yield Passage(way_to(port), channel, theirs)


async def _stream_of(accepted: socket.socket) -> SocketStream:
    """Return a connection as a stream; one that its program has reset is an OSError."""
    try:
        return await SocketStream.from_socket(accepted)
    except ValueError as error:
        raise ConnectionResetError(f"a connection out of a box: {error}") from error


async def _accepted(listener: socket.socket) -> socket.socket:
    while True:
        await anyio.wait_readable(listener)
        try:
            return listener.accept()[0]
        except OSError as error:  # its client has left, or there is no descriptor for it
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                await anyio.sleep(_FULL_S)
