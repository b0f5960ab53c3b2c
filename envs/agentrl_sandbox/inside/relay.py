"""Listens on one port, and carries the connections to it over standard input and output.

Invariant: a frame has the number of its connection, its kind and its length before its bytes. This program ends with its
standard input.
"""

from __future__ import annotations

import asyncio
import itertools
import struct
import sys
from contextlib import suppress

HEAD = struct.Struct(">IBI")
READY, OPEN, DATA, END, CLOSED = range(5)
"""Kinds: this program listens; a connection came; its bytes; its sender has no more; it is gone."""
PIECE = 65_536


class Relay:
    """Carries connections over two pipes."""

    def __init__(self, output: asyncio.StreamWriter) -> None:
        self.output = output
        self.turn = asyncio.Lock()  # noqa: TID251 - a box has no anyio
        self.connections: dict[int, tuple[asyncio.StreamReader, asyncio.StreamWriter]] = {}
        self.ended: set[int] = set()
        """Connections to which the other end sends no more."""
        self.numbers = itertools.count(1)

    async def write(self, number: int, kind: int, data: bytes = b"") -> None:
        """Write one frame, as soon as standard output takes it; until then no connection is read."""
        async with self.turn:
            self.output.write(HEAD.pack(number, kind, len(data)) + data)
            await self.output.drain()

    async def carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Carry what a new connection sends, until both sides have ended."""
        number = next(self.numbers)
        self.connections[number] = reader, writer
        await self.write(number, OPEN)
        try:
            while data := await reader.read(PIECE):
                await self.write(number, DATA, data)
            await self.write(number, END)
            if number in self.ended:
                writer.close()
            await writer.wait_closed()
        except OSError:
            await self.write(number, CLOSED)
        finally:
            writer.close()
            del self.connections[number]

    def take(self, number: int, kind: int, data: bytes) -> None:
        """Take one frame, perhaps for a connection that has gone."""
        if number not in self.connections:
            return
        reader, writer = self.connections[number]
        if kind == CLOSED:
            writer.transport.abort()
            return
        writer.write(data)
        if kind == END:
            self.ended.add(number)
            writer.write_eof()
            if reader.at_eof():
                writer.close()


async def main(port: int) -> None:
    """Carry until standard input ends."""
    loop = asyncio.get_running_loop()
    incoming = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(incoming), sys.stdin)
    pipe, protocol = await loop.connect_write_pipe(asyncio.streams.FlowControlMixin, sys.stdout)
    relay = Relay(asyncio.StreamWriter(pipe, protocol, None, loop))
    server = await asyncio.start_server(relay.carry, "127.0.0.1", port, backlog=64)
    await relay.write(0, READY)
    with suppress(asyncio.IncompleteReadError):
        while True:
            number, kind, length = HEAD.unpack(await incoming.readexactly(HEAD.size))
            relay.take(number, kind, await incoming.readexactly(length))
    server.close()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1])))
