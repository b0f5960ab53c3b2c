"""The model calls in flight at one server: sent, held back, interrupted, joined, aborted.

Invariant: while the gate is closed nothing is sent, so no request is parked where an abort cannot reach it; a call whose
version is pinned by the client is collected before the weights change, so no token can carry the wrong version.

Who waits for what: a call waits for the gate, which `open_gate` opens; `interrupt` waits for the calls in flight, which
the abort it has sent ends, or else the closing of their connections.

The streamed form of a model call: chunks of new ids, over as many pieces as the call takes.

Invariant: the ids handed out are, in order, exactly the ids of the `Generation` in the last chunk.

Only ids are read from the events on the way; log-probs and versions come from the last event of each piece. So when a
piece of which ids were handed out is lost, the stream fails with `ServerUnavailable` rather than guess.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, field

import anyio
import numpy as np
import orjson

from agentrl.concurrency import Deadline
from agentrl.errors import ReplyError, RequestRejected, ServerError, ServerUnavailable
from agentrl.inference.backend import GenerateRequest, Generation, GenerationChunk
from agentrl.inference.sglang.assembly import Assembly
from agentrl.inference.sglang.transport import Transport
from agentrl.inference.sglang.wire import check_request, parse_event, parse_reply
from agentrl.types import Int32Array


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


ABORT_TIMEOUT_S = 2.0
"""Seconds a cancelled call spends on telling the server so."""


@dataclass(slots=True, eq=False)
class Call:
    """One model call and its piece in flight."""

    assembly: Assembly
    started: float = field(default_factory=anyio.current_time)
    """When its deadline began to count."""
    wait: Deadline | None = None
    """Its wait now, or the last."""
    rid: str = ""
    """Of the piece sent last; empty before the first, and while the next one is held back."""
    pinned: int | None = None
    """Version of the piece in flight, where the server will not say."""
    interrupted: bool = False
    """Aborted here for a weight update; the call goes on afterwards."""
    dropped: bool = False
    """Its connection was closed from here."""
    caller_aborted: bool = False


class Calls:
    """Model calls at one server."""

    def __init__(self, transport: Transport, *, vocab_size: int, timeout_s: float) -> None:
        """Start with the gate open.

        Args:
            transport: to the server.
            vocab_size: ids sent and received are below it.
            timeout_s: deadline of one call, seconds.
        """
        self._transport = transport
        self.url = transport.url
        self.vocab_size = vocab_size
        self._timeout_s = timeout_s
        self._calls: dict[str, Call] = {}
        self._flying: set[Call] = set()
        self._landed: anyio.Event | None = None
        """Set when a piece has landed, if somebody waits for that."""
        self._gate: anyio.Event | None = None
        self._abort_later: list[str] = []
        self.pin: int | None = None
        """Version of what is sampled now, for servers that do not report it."""
        self.cache_salt = ""

    @property
    def in_flight(self) -> int:
        """Requests at the server."""
        return len(self._flying)

    async def generate(self, request: GenerateRequest) -> Generation:
        """Return the completion; see `Backend.generate`."""
        call = self._begin(request)
        try:
            while not call.assembly.done:
                await self._piece(call)
        finally:
            self._end(call)
        return call.assembly.generation()

    @asynccontextmanager
    async def stream(self, request: GenerateRequest) -> AsyncGenerator[AsyncIterator[GenerationChunk], None]:
        """Yield the completion as it is sampled; see `Backend.stream`."""
        call = self._begin(request)
        try:
            async with aclosing(Chunks(self, call)) as chunks:
                yield chunks
        finally:
            self._end(call)

    async def abort(self, request_id: str) -> None:
        """End a call; it returns what it has, with `StopReason.ABORT`. An unknown id is ignored.

        Raises:
            ServerError: when the server cannot be told.

        Cancellation: the server has been told or not.
        """
        call = self._calls.get(request_id)
        if call is None:
            return
        call.caller_aborted = True
        if not call.rid or self._gate is not None:
            self._drop(call)  # nothing at the server, or a paused server, which would lose the abort
        else:
            await self._send_abort(call.rid)

    def close_gate(self) -> None:
        """Hold back what is not sent yet."""
        if self._gate is None:
            self._gate = anyio.Event()

    def open_gate(self) -> None:
        """Let held calls go."""
        gate, self._gate = self._gate, None
        if gate is not None:
            gate.set()

    async def interrupt(self, drain_s: float) -> None:
        """Abort what is in flight and return when nothing is: the calls go on after `open_gate`, with what they have.

        Calls whose end does not come within `drain_s` lose their connection and what it would have brought.

        Raises:
            ServerError: when the server cannot be told.

        Cancellation: some calls are interrupted, others not; all go on after `open_gate`.
        """
        for call in self._flying:
            call.interrupted = True
        async with anyio.create_task_group() as tasks:
            for rid in [call.rid for call in self._flying]:
                tasks.start_soon(self._try_abort, rid)
        with anyio.move_on_after(drain_s):
            await self._all_landed()
        for call in tuple(self._flying):
            self._drop(call)
        await self._all_landed()

    async def abort_held(self) -> None:
        """Tell the server about calls that were cancelled while it was paused.

        Cancellation: some of them run to their end at the server, unread.
        """
        rids, self._abort_later = self._abort_later, []
        async with anyio.create_task_group() as tasks:
            for rid in rids:
                tasks.start_soon(self._try_abort, rid)

    def _begin(self, request: GenerateRequest) -> Call:
        check_request(request, self.vocab_size)
        rid = request.request_id
        if rid in self._calls:
            raise RequestRejected(f"request id {rid} is in use; each call needs its own uuid4 hex")
        call = self._calls[rid] = Call(Assembly(request, self.url))
        return call

    def _end(self, call: Call) -> None:
        del self._calls[call.assembly.request.request_id]
        call.wait = None  # it knows the call, for its message: a cycle would keep the arrays until the next collection

    async def _all_landed(self) -> None:
        while self._flying:
            self._landed = self._landed or anyio.Event()
            await self._landed.wait()

    def _drop(self, call: Call) -> None:
        call.dropped = True
        if call.wait is not None:
            call.wait.call_off()

    async def launch(self, call: Call, *, stream: bool) -> bytes:
        """Wait for the gate, then return the body of the next piece; `land` must follow."""
        while self._gate is not None:
            await self._gate.wait()
        call.rid, body = call.assembly.body(stream=stream, cache_salt=self.cache_salt)
        call.pinned, call.interrupted = self.pin, False
        self._flying.add(call)
        return body

    def land(self, call: Call) -> None:
        """Take the piece off the list of those in flight."""
        self._flying.discard(call)
        if self._landed is not None:
            self._landed.set()
            self._landed = None

    def deadline(self, call: Call) -> Deadline:
        """Return the deadline of a call, for its next wait; dropping the call calls the wait off."""
        call.wait = Deadline(self._timeout_s, lambda: self.waited(call), self.url, since=call.started)
        return call.wait

    async def _piece(self, call: Call) -> None:
        call.dropped, call.rid = False, ""
        with self.deadline(call):  # left without a reply when the call is dropped; if nobody aborted it, it is sent again
            if call.caller_aborted:
                call.assembly.abort()
                return
            body = await self.launch(call, stream=False)
            try:
                reply = await self._transport.call("POST", "/generate", body)
            except anyio.get_cancelled_exc_class():
                await self.abandon(call, call.rid)
                raise
            finally:
                self.land(call)
            self.take(call, reply, streamed=False)

    def take(self, call: Call, reply: bytes, *, streamed: bool) -> None:
        """Check the reply to a piece and add it to its call."""
        call.assembly.take(
            parse_reply(reply, vocab_size=self.vocab_size, url=self.url),
            call.pinned,
            expected=call.interrupted,
            caller_aborted=call.caller_aborted,
            streamed=streamed,
        )

    async def abandon(self, call: Call, rid: str) -> None:
        """Tell the server that nobody waits for a piece any more; at a paused server, when it goes on."""
        if self._gate is not None:
            self._abort_later.append(rid)
        elif not call.dropped:
            with anyio.move_on_after(ABORT_TIMEOUT_S, shield=True):
                await self._try_abort(rid)

    async def _try_abort(self, rid: str) -> None:
        # Where it fails, the connection is closed or its call fails by itself: the abort only saves the server work.
        with anyio.move_on_after(ABORT_TIMEOUT_S), suppress(ServerError):
            await self._send_abort(rid)

    async def _send_abort(self, rid: str) -> None:
        await self._transport.call("POST", "/abort_request", orjson.dumps({"rid": rid}))

    def waited(self, call: Call) -> str:
        """Return who waited for what, for the message of a deadline."""
        where = "held back, the server is paused" if self._gate is not None and not call.rid else "at the server"
        assembly = call.assembly
        limit = assembly.request.sampling.max_new_tokens
        return (
            f"{self.url}: request {assembly.request.request_id} of episode {assembly.request.episode_id!r} "
            f"({assembly.request.context.size} tokens, at most {limit} more) got no answer; it was {where}"
        )

    def payloads(self, body: bytes) -> AbstractAsyncContextManager[AsyncIterator[bytes]]:
        """Open the event stream of a piece."""
        return self._transport.events("/generate", body)
