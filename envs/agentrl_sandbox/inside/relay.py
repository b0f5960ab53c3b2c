"""Listens on one port, and carries the connections to it over standard input and output.

Invariant: a frame has the number of its connection, its kind and its length before its bytes. This program ends with its
standard input.
"""

from __future__ import annotations

import os
import selectors
import socket
import struct
import sys
from contextlib import suppress

HEAD = struct.Struct(">IBI")
READY, OPEN, DATA, END, CLOSED = range(5)
"""Kinds: this program listens; a connection came; its bytes; its sender has no more; it is gone."""
PIECE = 65_536
MUCH = 1 << 20
"""Bytes that wait for standard output from which on no connection is read."""


class Connection:
    """A connection to the port."""

    def __init__(self, number: int, stream: socket.socket) -> None:
        self.number, self.stream = number, stream
        self.unsent = bytearray()
        self.sends, self.is_sent_to = True, True
        """Whether the program here, and the other end, may still send."""

    def events(self, *, is_full: bool) -> int:
        """Return what to wait for."""
        reading = selectors.EVENT_READ if self.sends and not is_full else 0
        return reading | (selectors.EVENT_WRITE if self.unsent else 0)


class Relay:
    """Carries the connections of `listener`."""

    def __init__(self, listener: socket.socket) -> None:
        self.listener, self.connections, self.came = listener, dict[int, Connection](), bytearray()
        self.number = 0
        self.unwritten, self.is_full = bytearray(), False
        os.set_blocking(1, False)
        self.chooser = selectors.DefaultSelector()
        self.chooser.register(0, selectors.EVENT_READ, self.read_frames)
        self.chooser.register(listener, selectors.EVENT_READ, self.accept)
        self.is_open = True

    def run(self) -> None:
        """Carry until standard input ends."""
        self.write_frame(0, READY)
        while self.is_open:
            for key, events in self.chooser.select():
                if isinstance(key.data, Connection):
                    self.serve(key.data, events)
                else:
                    key.data()
            if self.is_full != (len(self.unwritten) > MUCH):
                self.is_full = not self.is_full
                for connection in list(self.connections.values()):
                    self.renew(connection)

    def accept(self) -> None:
        """Take a connection."""
        with suppress(OSError):
            stream, _ = self.listener.accept()
            stream.setblocking(False)
            self.number += 1
            connection = self.connections[self.number] = Connection(self.number, stream)
            self.renew(connection)
            self.write_frame(self.number, OPEN)

    def serve(self, connection: Connection, events: int) -> None:
        """Carry the bytes of a connection in both directions."""
        if self.connections.get(connection.number) is not connection:
            return
        try:
            if events & selectors.EVENT_READ:
                if data := connection.stream.recv(PIECE):
                    self.write_frame(connection.number, DATA, data)
                else:
                    connection.sends = False
                    self.write_frame(connection.number, END)
            if events & selectors.EVENT_WRITE:
                del connection.unsent[: connection.stream.send(connection.unsent)]
        except BlockingIOError:
            pass
        except OSError:
            self.write_frame(connection.number, CLOSED)
            self.forget(connection)
            return
        self.renew(connection)

    def renew(self, connection: Connection) -> None:
        """Wait for what may come next; a connection on which neither side sends is over."""
        if not connection.is_sent_to and not connection.unsent:
            with suppress(OSError):
                connection.stream.shutdown(socket.SHUT_WR)
            if not connection.sends:
                self.forget(connection)
                return
        self.watch(connection.stream, connection.events(is_full=self.is_full), connection)

    def watch(self, place: socket.socket | int, events: int, data: object) -> None:
        """Wait for `events` of a descriptor, and for no others."""
        is_watched = place in self.chooser.get_map()
        if not events:
            if is_watched:
                self.chooser.unregister(place)
        elif is_watched:
            self.chooser.modify(place, events, data)
        else:
            self.chooser.register(place, events, data)

    def forget(self, connection: Connection) -> None:
        """Close a connection."""
        del self.connections[connection.number]
        with suppress(KeyError):
            self.chooser.unregister(connection.stream)
        connection.stream.close()

    def read_frames(self) -> None:
        """Take what the other end sends."""
        piece = os.read(0, PIECE)
        self.is_open = bool(piece)
        self.came += piece
        while len(self.came) >= HEAD.size:
            number, kind, length = HEAD.unpack_from(self.came)
            if len(self.came) < HEAD.size + length:
                return
            data = bytes(self.came[HEAD.size : HEAD.size + length])
            del self.came[: HEAD.size + length]
            if number in self.connections:
                self.take(self.connections[number], kind, data)

    def take(self, connection: Connection, kind: int, data: bytes) -> None:
        """Take one frame."""
        if kind == CLOSED:
            self.forget(connection)
            return
        connection.unsent += data
        connection.is_sent_to = connection.is_sent_to and kind != END
        self.renew(connection)

    def write_frame(self, number: int, kind: int, data: bytes = b"") -> None:
        """Write one frame to standard output, as soon as that takes it."""
        self.unwritten += HEAD.pack(number, kind, len(data)) + data
        self.watch(1, selectors.EVENT_WRITE, self.write)

    def write(self) -> None:
        """Write what waits."""
        with suppress(BlockingIOError):
            del self.unwritten[: os.write(1, self.unwritten[:PIECE])]
        if not self.unwritten:
            self.watch(1, 0, None)


if __name__ == "__main__":
    with socket.create_server(("127.0.0.1", int(sys.argv[1])), backlog=64) as server:
        server.setblocking(False)
        Relay(server).run()
