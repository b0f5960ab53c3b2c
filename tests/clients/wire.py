"""A relay between a client and a door, which reads along and can cut connections."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager, suppress

import anyio
from anyio.abc import SocketAttribute, SocketStream

from agentrl.support.concurrency import task_group

_ANSWER_ID = re.compile(rb'"id":\s*"((?:chatcmpl-|resp_|msg_)[^"]+)"')
_REQUEST = re.compile(rb"(?:^|\r?\n|\})((?:POST|GET|HEAD) [^ ]+) HTTP/1\.1\r\n")


class Wire:
    """The connections between one client and a door.

    Args:
        port: of the door's server, on loopback.
    """

    def __init__(self, port: int) -> None:
        self.port = 0
        """Of the relay, which the client is given in the place of the door's."""
        self.withholds = False
        """Whether what the door answers is kept from the client."""
        self.withheld = bytearray()
        self._door_port = port
        self._open: dict[SocketStream, SocketStream] = {}
        self._sent: list[bytearray] = []
        self._received: list[bytearray] = []

    @property
    def requests(self) -> list[str]:
        """The method and the path of each request, connection by connection."""
        return [found.decode() for each in self._sent for found in _REQUEST.findall(bytes(each))]

    @property
    def streams(self) -> bool:
        """Whether a request asked for a stream."""
        return any(re.search(rb'"stream":\s*true', each) for each in self._sent)

    @property
    def has_marked_retry(self) -> bool:
        """Whether a request said that it repeats an earlier one."""
        return any(re.search(rb"x-stainless-retry-count: [1-9]", each, re.IGNORECASE) for each in self._sent)

    @property
    def has_whole_answer(self) -> bool:
        """Whether the answer that was withheld is complete."""
        head, _, body = bytes(self.withheld).partition(b"\r\n\r\n")
        length = re.search(rb"content-length: (\d+)", head, re.IGNORECASE)
        return body.endswith(b"0\r\n\r\n") if length is None else len(body) == int(length[1])

    def answer_ids(self, prefix: str) -> list[str]:
        """Return the different ids of answers that begin with `prefix`, in the order in which they came."""
        found = [each.decode() for received in self._received for each in _ANSWER_ID.findall(bytes(received))]
        return [each for each in dict.fromkeys(found) if each.startswith(prefix)]

    def withhold(self) -> None:
        """Keep what the door answers from the client, until the connections are cut."""
        self.withholds = True

    async def cut(self) -> None:
        """Close all connections, as a network does that fails."""
        self.withholds = False
        for near, far in list(self._open.items()):
            await anyio.aclose_forcefully(near)
            await anyio.aclose_forcefully(far)

    async def carry(self, near: SocketStream) -> None:
        """Relay one connection until either side ends it."""
        with suppress(OSError, anyio.BrokenResourceError, anyio.ClosedResourceError):
            async with AsyncExitStack() as stack:
                await stack.enter_async_context(near)
                far = await stack.enter_async_context(await anyio.connect_tcp("127.0.0.1", self._door_port))
                self._open[near] = far
                stack.callback(self._open.pop, near)
                sent, received = bytearray(), bytearray()
                self._sent.append(sent)
                self._received.append(received)
                async with task_group() as tasks:
                    tasks.start_soon(self._pump, near, far, sent)
                    await self._pump(far, near, received)
                    tasks.cancel_scope.cancel()

    async def _pump(self, source: SocketStream, target: SocketStream, seen: bytearray) -> None:
        with suppress(OSError, anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError):
            while True:
                data = await source.receive()
                if self.withholds and target in self._open:
                    self.withheld += data
                    continue
                seen += data
                await target.send(data)
        with suppress(OSError, anyio.BrokenResourceError, anyio.ClosedResourceError):
            await target.aclose()


@asynccontextmanager
async def open_wire(port: int) -> AsyncGenerator[Wire]:
    """Yield a relay to a port of loopback."""
    wire = Wire(port)
    async with await anyio.create_tcp_listener(local_host="127.0.0.1") as listener, task_group() as tasks:
        wire.port = listener.extra(SocketAttribute.local_port)
        tasks.start_soon(listener.serve, wire.carry)
        try:
            yield wire
        finally:
            tasks.cancel_scope.cancel()
