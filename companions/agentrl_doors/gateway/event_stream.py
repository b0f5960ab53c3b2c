"""Answers as server-sent events: the one sender of `agentrl serve`, doors and online runs.

Clients and proxies close connections that are silent for long, so a response that has nothing to send for `interval_s`
seconds sends its sign of life.

Invariant: a response begins with its first event or with the first sign of life, and until then an error can have a status
of its own. From then on an error is the last event, in the words of the dialect.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from typing import Final, Protocol

import anyio
from aiohttp import web

from agentrl.client.backend import Answer, Delta, Piece
from agentrl.support.concurrency import task_group
from agentrl_doors.gateway.dialect import EventWriter
from agentrl_doors.gateway.dialects.answers import COMMENT, delta_of
from agentrl_doors.gateway.refusals import code_of, known_error, status_of

KEEP_ALIVE_S: Final = 15.0
"""The longest silence of a stream, seconds."""
_HEADERS: Final = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}


class StreamSigns(Protocol):
    """The frames of a stream that belong to no answer; `EventWriter` has them."""

    def sign(self) -> bytes:
        """Return what says in a long silence that the call runs."""
        ...

    def fail(self, message: str, *, status: int, code: str | None = None) -> Sequence[bytes]:
        """Return the frames that end a stream with an error."""
        ...


async def frames_of(pieces: AsyncIterator[Piece], writer: Callable[[], EventWriter]) -> AsyncGenerator[bytes]:
    """Yield the frames of one answer as its pieces come; `writer` is asked for when the first piece is there."""
    begun: EventWriter | None = None
    async for piece in pieces:
        frames = [*(begun := writer()).begin()] if begun is None else []
        if isinstance(piece, Answer):
            frames += begun.finish(piece)
        else:
            frames += begun.push(piece if isinstance(piece, Delta) else delta_of(piece))
        if frames:
            yield b"".join(frames)


async def send_events(
    request: web.Request,
    frames: AsyncGenerator[bytes],
    signs: Callable[[], StreamSigns],
    *,
    interval_s: float,
    headers: Mapping[str, str] | None = None,
) -> web.StreamResponse:
    """Send frames as they come, and return the response; an error before the first of them is raised.

    `signs` is asked from the first frame on, or when the frames fail. A client that disconnects ends the response without an
    error. Cancellation: the response ends where it is; the owner of `frames` aborts the call.
    """
    sending = _Sending(request, headers or {}, interval_s)
    with suppress(ConnectionResetError):  # there is no one to answer
        async with aclosing(frames), task_group() as tasks:
            tasks.start_soon(sending.live)
            try:
                async for frame in frames:
                    sending.sign = signs().sign()
                    await sending.send(frame)
            except ConnectionResetError:
                raise
            except Exception as error:  # noqa: BLE001 - the client learns of it in the words of its dialect
                known = known_error(error)
                await sending.fail(known, lambda: signs().fail(str(known), status=status_of(known), code=code_of(known)))
            finally:
                tasks.cancel_scope.cancel()
        await sending.response.write_eof()
    return sending.response


class _Sending:
    """One response of events."""

    def __init__(self, request: web.Request, headers: Mapping[str, str], interval_s: float) -> None:
        self.response = web.StreamResponse(headers={**_HEADERS, **headers})
        self.sign: bytes = COMMENT
        """The sign of life from now on."""
        self._request, self._interval_s = request, interval_s
        self._lock = anyio.Lock(fast_acquire=True)
        self._sent_at = anyio.current_time()

    async def send(self, frames: bytes) -> None:
        """Send frames at once."""
        async with self._lock:
            await self._write(frames)

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
        await self.response.write(data)
        self._sent_at = anyio.current_time()
