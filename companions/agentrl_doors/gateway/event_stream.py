"""Responses of server-sent events that are never silent for long: clients and proxies close connections that are.

Invariant: a response that has nothing to send for `interval_s` seconds sends its sign of life. It begins with its first
event or with the first of these signs, and until then an error can have a status of its own.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Final

import anyio
from aiohttp import web

from agentrl.support.concurrency import task_group

KEEP_ALIVE_S: Final = 15.0
"""The longest silence of a stream, seconds."""
COMMENT: Final = b": the call runs\n\n"
"""The sign of life that each reader of events passes over."""
_HEADERS: Final = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}


class EventResponse:
    """One response of events."""

    def __init__(self, request: web.Request, headers: Mapping[str, str], interval_s: float) -> None:
        self.response = web.StreamResponse(headers={**_HEADERS, **headers})
        self.sign: bytes = COMMENT
        """The sign of life from now on."""
        self._request, self._interval_s = request, interval_s
        self._lock = anyio.Lock(fast_acquire=True)
        self._sent_at = anyio.current_time()

    async def send(self, frames: Iterable[bytes]) -> None:
        """Send frames at once."""
        async with self._lock:
            await self._write(b"".join(frames))

    async def fail(self, error: Exception, frames: Callable[[], Sequence[bytes]]) -> None:
        """Send the frames of an error, or raise the error where nothing was sent yet."""
        async with self._lock:
            if not self.response.prepared:
                raise error
            await self._write(b"".join(frames()))

    async def live(self) -> None:
        """Send signs of life, for ever."""
        with suppress(ConnectionResetError):  # the client has disconnected, which ends the handler
            while True:
                await anyio.sleep_until(self._sent_at + self._interval_s)
                async with self._lock:
                    if anyio.current_time() >= self._sent_at + self._interval_s:
                        await self._write(self.sign)

    async def _write(self, data: bytes) -> None:
        if not self.response.prepared:
            await self.response.prepare(self._request)
        if data:
            await self.response.write(data)
        self._sent_at = anyio.current_time()


@asynccontextmanager
async def event_response(
    request: web.Request, headers: Mapping[str, str], *, interval_s: float
) -> AsyncGenerator[EventResponse]:
    """Yield a response that gives signs of life inside the block, and end it after the block.

    A client that disconnects ends the block without an error. Cancellation: the response ends where it is.
    """
    events = EventResponse(request, headers, interval_s)
    with suppress(ConnectionResetError):  # there is no one to answer
        async with task_group() as tasks:
            tasks.start_soon(events.live)
            try:
                yield events
            finally:
                tasks.cancel_scope.cancel()
        await events.response.write_eof()
