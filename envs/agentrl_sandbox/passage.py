"""One way out of a box: a port of its own loopback, which leads to a port of this machine.

Invariant: the box keeps its own network, which has nothing but a loopback. Its first process makes the listening socket,
gives it to this process and then becomes the supervisor; what comes in is carried from outside, to one port and no other.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Generator
from contextlib import ExitStack, contextmanager, suppress
from typing import Final, TypeAlias

import anyio

from agentrl.errors import EnvironmentFault
from agentrl.support.concurrency import task_group

Port: TypeAlias = int | tuple[int, int]
"""A port of this machine, which the box has under the same number; or the box's own and the one of this machine."""
MAX_CARRIED: Final = 64
"""Connections of one box at a time; further ones wait."""
_PIECE: Final = 65_536
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


class Passage:
    """The way out of one box."""

    def __init__(self, port: Port, channel: socket.socket, theirs: socket.socket) -> None:
        self._inner_port, self._outer_port = (port, port) if isinstance(port, int) else port
        self._channel, self._theirs = channel, theirs
        self._slots = anyio.Semaphore(MAX_CARRIED)

    @property
    def descriptor(self) -> int:
        """The descriptor that the box has to inherit."""
        return self._theirs.fileno()

    def before(self, command: tuple[str, ...]) -> tuple[str, ...]:
        """Return a command that makes the listening socket and becomes `command`, whose first word is a Python."""
        return (command[0], "-I", "-S", "-B", "-c", _LISTEN, str(self.descriptor), str(self._inner_port), *command)

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

    async def _connection(self, inner: socket.socket) -> None:
        try:
            with inner, socket.socket() as outer, suppress(OSError):
                inner.setblocking(False)
                outer.setblocking(False)
                with suppress(BlockingIOError):
                    outer.connect(("127.0.0.1", self._outer_port))
                async with task_group() as tasks:
                    tasks.start_soon(_copy_bytes, inner, outer)
                    tasks.start_soon(_copy_bytes, outer, inner)
        finally:
            self._slots.release()


@contextmanager
def open_passage(port: Port) -> Generator[Passage]:
    """Yield a way for one box to a port of this machine's loopback."""
    with ExitStack() as stack:
        channel, theirs = (stack.enter_context(end) for end in socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        channel.setblocking(False)
        yield Passage(port, channel, theirs)


async def _accepted(listener: socket.socket) -> socket.socket:
    while True:
        await anyio.wait_readable(listener)
        try:
            return listener.accept()[0]
        except OSError as error:  # its client has left, or there is no descriptor for it
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                await anyio.sleep(_FULL_S)


async def _copy_bytes(source: socket.socket, target: socket.socket) -> None:
    """Copy what one side sends to the other, its end included; a side that has gone ends both ways."""
    await anyio.wait_writable(target)
    while True:
        await anyio.wait_readable(source)
        try:
            data = source.recv(_PIECE)
        except BlockingIOError:
            continue
        if not data:
            with suppress(OSError):
                target.shutdown(socket.SHUT_WR)
            return
        view = memoryview(data)
        while view:
            try:
                view = view[target.send(view) :]
            except BlockingIOError:
                await anyio.wait_writable(target)
