"""The streamed form of a model call: chunks of new ids, over as many pieces as the call takes.

Invariant: the ids handed out are, in order, exactly the ids of the `Generation` in the last chunk.

Only ids are read from the events on the way; log-probs and versions come from the last event of each piece. So when a
piece of which ids were handed out is lost, the stream fails with `ServerUnavailable` rather than guess.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

import anyio
import numpy as np

from agentrl.errors import ReplyError, ServerUnavailable
from agentrl.inference.base import GenerationChunk
from agentrl.inference.wire import parse_event
from agentrl.types import Int32Array

if TYPE_CHECKING:
    from agentrl.inference.calls import Call, Calls


class Chunks(AsyncIterator[GenerationChunk]):
    """The chunks of one call. One task iterates it; `aclose` aborts at the server what has not ended."""

    def __init__(self, calls: Calls, call: Call) -> None:
        """Begin; nothing is sent before the first chunk is asked for."""
        self._calls, self._call = calls, call
        self._emitted: list[int] = []
        self._kept = 0
        """Ids of finished pieces."""
        self._piece: AsyncExitStack | None = None
        self._events: AsyncIterator[bytes] | None = None

    async def __anext__(self) -> GenerationChunk:
        call = self._call
        if call.assembly.done:
            raise StopAsyncIteration
        while True:
            with self._calls.deadline(call) as wait:
                if call.dropped:
                    wait.call_off()
                chunk = await self._next()
                if chunk is not None:
                    return chunk
            if call.dropped:
                await self._dropped()

    async def _next(self) -> GenerationChunk | None:
        """Return the next chunk; None when a piece ended without new ids and the call goes on."""
        if self._events is None:
            body = await self._calls.launch(self._call, stream=True)
            self._piece = AsyncExitStack()
            self._events = await self._piece.enter_async_context(self._calls.payloads(body))
        payload = await anext(self._events, None)
        if payload is None:
            raise ReplyError(f"{self._calls.url}: the stream ended without a finish reason", url=self._calls.url)
        event = parse_event(payload, vocab_size=self._calls.vocab_size, url=self._calls.url)
        if event.finished:
            return await self._finish(payload)
        new = event.output_ids[len(self._emitted) - self._kept :]
        self._emitted += new
        return GenerationChunk(output_ids=np.array(new, np.int32)) if new else None

    async def _finish(self, payload: bytes) -> GenerationChunk | None:
        assembly = self._call.assembly
        self._calls.take(self._call, payload, streamed=True)
        ids = assembly.output_ids
        if ids[: len(self._emitted)].tolist() != self._emitted:
            raise ReplyError(f"{self._calls.url}: the last event contradicts the ids streamed before", url=self._calls.url)
        new: Int32Array = ids[len(self._emitted) :]
        self._emitted = ids.tolist()
        self._kept = len(ids)
        await self._close_piece()
        if assembly.done:
            return GenerationChunk(output_ids=new, generation=assembly.generation())
        return GenerationChunk(output_ids=new) if len(new) else None

    async def _dropped(self) -> None:
        call = self._call
        call.dropped = False
        cut = len(self._emitted) > self._kept
        await self.aclose()
        if cut or call.caller_aborted:
            why = "aborted" if call.caller_aborted else "cut off for a weight update"
            raise ServerUnavailable(
                f"{self._calls.url}: the stream of request {call.assembly.request.request_id} was {why} before the server "
                f"reported the log-probs of its last {len(self._emitted) - self._kept} ids",
                url=self._calls.url,
            )

    async def _close_piece(self) -> None:
        self._calls.land(self._call)
        self._call.rid = ""
        piece, self._piece, self._events = self._piece, None, None
        if piece is not None:
            with anyio.CancelScope(shield=True):  # closes the connection; waits for nothing
                await piece.aclose()

    async def aclose(self) -> None:
        """End the call; what has not ended is aborted at the server.

        Cancellation: the connection is closed all the same.
        """
        if self._call.rid:
            rid = self._call.rid
            await self._close_piece()
            await self._calls.abandon(self._call, rid)
