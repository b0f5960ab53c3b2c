"""The driver's end of the streams of a trainer worker: requests out, replies and heartbeats in.

Invariant: a reply goes to the request whose number it carries, so that several requests can be under way; the last words of
a worker go to all of them. When the stream
ends or is not one of frames, every request under way fails with that error, and so does every later one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import anyio
from anyio.abc import ByteStream

from agentrl.errors import InvariantError, TrainerDied
from agentrl.trainer.worker import protocol
from agentrl.trainer.worker.processes import STREAM_ENDS


@dataclass(slots=True, kw_only=True)
class NumberedRequest:
    """A request, and its reply once there is one."""

    number: int
    frame: bytes
    ended: anyio.Event = field(default_factory=anyio.Event)
    """Set when the reply is there or none will come."""
    reply: protocol.WorkerReply | None = None


class WorkerConnection:
    """The requests under way; `read` must run for as long as they are made."""

    def __init__(self, stream: ByteStream, on_sign: Callable[[], None]) -> None:
        """Speak to the worker at the other end of `stream`; `on_sign` is called at each heartbeat and reply."""
        self._stream, self._on_sign = stream, on_sign
        self._waiting: dict[int, NumberedRequest] = {}
        self._made = 0
        self._failure: Exception | None = None
        # Concurrent requests must not mix their frames.
        self._sending = anyio.Lock()

    def numbered(self, request: protocol.WorkerRequest) -> NumberedRequest:
        """Return `request` for `exchange`.

        Raises:
            InvariantError: it is too large.
        """
        self._made += 1
        return NumberedRequest(number=self._made - 1, frame=protocol.encode_frame(request, self._made - 1))

    async def exchange(self, request: NumberedRequest) -> protocol.WorkerReply:
        """Send `request` and return its reply.

        Raises:
            anyio.EndOfStream, anyio.BrokenResourceError, ConnectionError: the worker closed its streams.
            InvariantError: the worker answered with something that is no reply.

        Cancellation: a request that was sent in part breaks the connection; otherwise its reply is dropped.
        """
        self._waiting[request.number] = request
        try:
            await self._send(request.frame)
            await request.ended.wait()
        finally:
            del self._waiting[request.number]
        if request.reply is None:
            assert self._failure is not None
            raise self._failure
        return request.reply

    async def read(self) -> None:
        """Hand out the replies until the stream ends.

        Cancellation: requests under way get no reply.
        """
        try:
            while True:
                await self._read_frame()
        except (*STREAM_ENDS, InvariantError) as error:
            self._fail(error)

    async def _send(self, frame: bytes) -> None:
        async with self._sending:
            if self._failure is not None:
                raise self._failure
            sent = False
            try:
                await self._stream.send(frame)
                sent = True
            finally:
                if not sent:
                    self._fail(anyio.BrokenResourceError())

    async def _read_frame(self) -> None:
        header = await self._receive(protocol.HEADER_BYTES)
        length = protocol.body_length(header)
        self._on_sign()
        if not length:  # a heartbeat
            return
        reply = protocol.decode_reply(await self._receive(length))
        waiting = self._waiting.get(protocol.request_number(header))
        last_words = isinstance(reply, protocol.Failed) and reply.kind == TrainerDied.__name__
        for request in self._waiting.values() if last_words else [waiting] if waiting is not None else []:
            request.reply = reply
            request.ended.set()

    async def _receive(self, count: int) -> bytearray:
        received = bytearray()
        while len(received) < count:
            received += await self._stream.receive(count - len(received))
        return received

    def _fail(self, error: Exception) -> None:
        self._failure = self._failure or error
        for waiting in self._waiting.values():
            waiting.ended.set()
