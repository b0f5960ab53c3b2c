"""The model calls in flight at one server: sent, held back during a pause, aborted; whole and streamed.

Invariant: nothing is sent while the gate is closed, so no request waits at a paused server where an abort cannot reach it.
Each id keeps the log-prob and the version that it was sampled with, also in a call that the server aborted and got again.
The ids of a stream's chunks are, in order, exactly the ids of the `Generation` in its last chunk.

Who waits for whom: a call waits for the gate, which `open_gate` opens, and then for the server. Each call has one deadline.

Only ids are read from the events of a stream before the last; log-probs and versions come from the last event of each piece.
A stream that loses a piece after its ids are out therefore fails with `ServerUnavailable`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from uuid import uuid4

import anyio
import numpy as np
import orjson

from agentrl.errors import ReplyError, RequestRejected, ServerError, ServerUnavailable
from agentrl.inference.backend import GenerateRequest, Generation, GenerationChunk
from agentrl.inference.sglang.adapter_uses import AdapterUses, NamedAdapter
from agentrl.inference.sglang.transport import Transport
from agentrl.inference.sglang.wire import GenerateReply, check_request, generate_body, parse_event, parse_reply
from agentrl.support.concurrency import Deadline
from agentrl.types import Float32Array, Int32Array, StopReason, VersionSpan

_MAX_SERVER_ABORTS = 8
"""Aborts in one call that agentrl did not ask for, before the call fails."""
_NO_IDS, _NO_LOGPROBS = np.empty(0, np.int32), np.empty(0, np.float32)
ABORT_TIMEOUT_S = 2.0
"""Seconds that a cancelled call spends on its abort at the server."""
_REPLY_BYTES, _TOKEN_BYTES = 2**20, 2**10
"""Longest reply to a model call: so many bytes, and so many more for each token that it may sample."""


class Assembly:
    """A call in progress: the tokens sampled so far, and the body that asks for the rest."""

    def __init__(self, request: GenerateRequest, url: str) -> None:
        self.request = request
        self._url = url
        self.output_ids: Int32Array = _NO_IDS
        """The ids kept so far, `[T] int32`."""
        self._logprobs: Float32Array = _NO_LOGPROBS
        self._spans: list[VersionSpan] = []
        self._cached = 0
        self._retractions = 0
        self._aborts = 0
        self._sent = False
        self._stop_reason: StopReason | None = None
        self._matched: int | str | None = None

    @property
    def done(self) -> bool:
        return self._stop_reason is not None

    def body(self, *, stream: bool = False, cache_salt: str = "", adapter: str = "", session: str = "") -> tuple[str, bytes]:
        """Return the id and the body of the request for the missing tokens; each piece has a new id."""
        request, sampling = self.request, self.request.sampling
        rid, ids_json = request.request_id, request.context.json
        if self._sent:
            rid = uuid4().hex  # SGLang aborts the id of a streamed reply once more, 2 s after its end
        self._sent = True
        kept = len(self.output_ids)
        if kept:
            sampled = ",".join(map(str, self.output_ids.tolist()))
            ids_json = (*ids_json, b",", sampled.encode())
            # The same seed would draw the noise of the first piece again. Servers take 63 bits and a sign.
            seed = sampling.seed
            sampling = sampling if seed is None else replace(sampling, seed=(seed + kept + 2**63) % 2**64 - 2**63)
        limit = sampling.max_new_tokens - kept
        return rid, generate_body(
            sampling,
            rid=rid,
            ids_json=ids_json,
            limit=limit,
            stream=stream,
            cache_salt=cache_salt,
            adapter=adapter,
            session=session,
        )

    def take(self, reply: GenerateReply, *, caller_aborted: bool, streamed: bool = False, moved: bool = False) -> None:
        """Add a checked reply as a piece; afterwards the call is `done`, or must be sent again.

        `caller_aborted`: the caller gets the tokens there are. `streamed`: it has them, so they cannot be sampled again.
        `moved`: an abort is agentrl's own, and counts as a retraction.

        Raises:
            ReplyError: the piece has more tokens than asked for.
            ServerUnavailable: the piece has a version below that of the piece before, so it is from a restarted server; or
                there were too many aborts.
            RequestRejected, ServerUnavailable: the abort carries that HTTP status.
        """
        limit = self.request.sampling.max_new_tokens
        if len(reply.output_ids) > limit - len(self.output_ids):
            raise self._broken(f"more tokens ({len(reply.output_ids)}) than asked for")
        if reply.finish != "abort":
            self._add(reply)
            self._stop_reason, self._matched = StopReason(reply.finish), reply.matched
            return
        if (status := reply.status_code) is not None:
            kind = RequestRejected if 400 <= status < 500 else ServerUnavailable
            raise kind(f"{self._url}: HTTP {status} in the reply: {reply.message}", status=status, url=self._url)
        self._add(reply)
        if caller_aborted:
            self._stop_reason = StopReason.ABORT
        elif len(self.output_ids) == limit:
            self._stop_reason = StopReason.LENGTH
        elif not streamed and not self.continuable:
            self.output_ids, self._logprobs, self._spans = _NO_IDS, _NO_LOGPROBS, []
        if moved:
            self._retractions += not self.done
            return
        self._aborts += 1
        if not self.done and self._aborts > _MAX_SERVER_ABORTS:
            raise ServerUnavailable(
                f"{self._url}: the server aborted request {self.request.request_id} {self._aborts} times, at last with "
                f"{reply.message!r}; does another program abort or pause this server?",
                url=self._url,
            )

    def abort(self) -> None:
        self._stop_reason = StopReason.ABORT

    def generation(self) -> Generation:
        """Return the whole call; `done` must hold."""
        assert self._stop_reason is not None
        return Generation(
            output_ids=self.output_ids,
            output_logprobs=self._logprobs,
            spans=tuple(self._spans),
            stop_reason=self._stop_reason,
            matched_stop=self._matched,
            cached_tokens=self._cached,
            num_retractions=self._retractions,
            server=self._url,
        )

    @property
    def continuable(self) -> bool:
        """Whether the rest may be asked for in a request of its own."""
        # A server finds stop strings, and counts tokens for penalties, in the output of one request only.
        sampling = self.request.sampling
        return not sampling.stop and sampling.frequency_penalty == 0 and sampling.presence_penalty == 0

    def _add(self, reply: GenerateReply) -> None:
        if not reply.spans:
            return
        kept = len(self.output_ids)
        last = self._spans[-1].version if self._spans else -1
        if reply.spans[0].version < last:
            version = reply.spans[0].version
            raise ServerUnavailable(
                f"{self._url}: request {self.request.request_id} got version {version} after version {last} in one call; "
                "was the server restarted?",
                url=self._url,
            )
        for span in reply.spans:
            start, end = span.start + kept, span.end + kept
            if self._spans and self._spans[-1].version == span.version:
                start = self._spans.pop().start
            self._spans.append(VersionSpan(start=start, end=end, version=span.version))
        if kept:
            self.output_ids = np.concatenate([self.output_ids, reply.output_ids])
            self._logprobs = np.concatenate([self._logprobs, reply.output_logprobs])
        else:
            self.output_ids, self._logprobs, self._cached = reply.output_ids, reply.output_logprobs, reply.cached_tokens
        self._retractions += reply.num_retractions

    def _broken(self, got: str) -> ReplyError:
        return ReplyError(f"{self._url}: request {self.request.request_id} got {got}", url=self._url)


class Sessions:
    """The sessions of the episodes at one server, which keeps the cached prefixes of open ones."""

    def __init__(self) -> None:
        self.supported: bool | None = None
        """Whether the server has sessions; without them no call names one. None: not known yet."""
        self._prefix = uuid4().hex[:12]
        """SGLang never opens a closed session again, and the episodes of another run have the same ids."""

    def of(self, episode_id: str) -> str:
        """Return the id of an episode's session; empty where the server has none."""
        return f"{self._prefix}-{episode_id}" if self.supported else ""


@dataclass(slots=True, eq=False)
class ServerCall:
    """A model call and its piece in flight."""

    assembly: Assembly
    started: float = field(default_factory=anyio.current_time)
    """When its deadline began to count."""
    wait: Deadline | None = None
    """Its wait now, or the last one."""
    rid: str = ""
    """Id of the last piece sent; empty before the first, and while the next one is held back."""
    dropped: bool = False
    """The caller aborted it where the server cannot; agentrl closed its connection."""
    caller_aborted: bool = False
    adapter: NamedAdapter | None = None
    """Of the last piece sent."""
    moved: bool = False
    """agentrl aborted its piece in flight, so that the rest is sampled with a newer adapter."""


def _explained(call: ServerCall, error: RequestRejected) -> ServerError:
    return error if call.adapter is None else call.adapter.lost(error)


def _longest_reply(call: ServerCall) -> int:
    return _REPLY_BYTES + _TOKEN_BYTES * call.assembly.request.sampling.max_new_tokens


class ServerCalls:
    """Model calls at one server."""

    def __init__(self, transport: Transport, *, vocab_size: int, timeout_s: float) -> None:
        self._transport = transport
        self.url = transport.url
        self.vocab_size = vocab_size
        self._timeout_s = timeout_s
        self._calls: dict[str, ServerCall] = {}
        self._sent: set[ServerCall] = set()
        self._gate: anyio.Event | None = None
        self._abort_later: list[str] = []
        self.cache_salt = ""
        """Keeps requests apart from cached prefixes of earlier weights; empty where the cache was flushed."""
        self.sessions = Sessions()
        self.adapters: AdapterUses | None = None  # before the first one

    @property
    def in_flight(self) -> int:
        return len(self._sent)

    async def generate(self, request: GenerateRequest) -> Generation:
        """Return the completion of `request`.

        A request that the server aborts for reasons of its own is sent again, with the tokens it has, within the deadline.

        Raises:
            ServerUnavailable: the server refused, reset the connection or died.
            ServerTimeout: the server did not answer within the deadline, which counts pauses too.
            RequestRejected: the request would harm the server, and was not sent; or HTTP 4xx.
            ReplyError: the reply breaks the protocol.

        Cancellation: aborts the request at the server; while the server is paused, once it continues.
        """
        call = self._begin(request)
        try:
            while not call.assembly.done:
                await self._piece(call)
        finally:
            self._end(call)
        return call.assembly.generation()

    @asynccontextmanager
    async def stream(self, request: GenerateRequest) -> AsyncGenerator[AsyncIterator[GenerationChunk], None]:
        """Yield the completion of `request` as it is sampled; errors as for `generate`."""
        call = self._begin(request)
        try:
            async with aclosing(Chunks(self, call)) as chunks:
                yield chunks
        finally:
            self._end(call)

    async def abort(self, request_id: str) -> None:
        """End a call; it returns the tokens it has, with `StopReason.ABORT`. An unknown id is ignored."""
        call = self._calls.get(request_id)
        if call is None:
            return
        call.caller_aborted = True
        if call.rid and self._gate is None:
            await self._send_abort(call.rid)
            return
        call.dropped = True  # not at the server yet, or at a paused server, which would lose the abort
        if call.wait is not None:
            call.wait.call_off()

    async def give_up(self, request_id: str) -> None:
        """End a call as `abort` does, but after a pause: the tokens of a paused call cannot be had."""
        while self._gate is not None and (call := self._calls.get(request_id)) is not None and call.rid:
            await self._gate.wait()
        await self.abort(request_id)

    def close_gate(self) -> None:
        """Hold back every piece that is not sent yet."""
        if self._gate is None:
            self._gate = anyio.Event()

    def open_gate(self) -> None:
        gate, self._gate = self._gate, None
        if gate is not None:
            gate.set()

    async def move_on(self, oldest: int) -> None:
        """Have calls of adapters below version `oldest` continue with the served one: their pieces end, others follow.

        A call that cannot be continued ends with the adapter that it has, and so may one that was sent just now.
        """
        async with anyio.create_task_group() as tasks:
            for call in self._sent:
                if call.adapter is not None and call.adapter.version < oldest and call.assembly.continuable:
                    call.moved = True
                    tasks.start_soon(self._try_abort, call.rid)

    async def abort_held(self) -> None:
        """Abort at the server the calls that were cancelled while it was paused.

        Cancellation: some of them run to their end at the server, unread.
        """
        rids, self._abort_later = self._abort_later, []
        async with anyio.create_task_group() as tasks:
            for rid in rids:
                tasks.start_soon(self._try_abort, rid)

    def deadline(self, call: ServerCall) -> Deadline:
        """Return the deadline of a call for its next wait; dropping the call ends the wait."""
        call.wait = Deadline(self._timeout_s, lambda: self._waited(call), self.url, since=call.started)
        return call.wait

    async def launch(self, call: ServerCall, *, stream: bool) -> bytes:
        """Wait for the gate, then return the body of the next piece; `land` must follow."""
        while self._gate is not None:
            await self._gate.wait()
        call.adapter, call.moved = None if self.adapters is None else self.adapters.begin(), False
        name = "" if call.adapter is None else call.adapter.name
        session = self.sessions.of(call.assembly.request.episode_id)
        call.rid, body = call.assembly.body(stream=stream, cache_salt=self.cache_salt, adapter=name, session=session)
        self._sent.add(call)
        return body

    def land(self, call: ServerCall) -> None:
        """Count a piece as in flight no longer."""
        if call not in self._sent:
            return
        self._sent.discard(call)
        if self.adapters is not None and call.adapter is not None:
            self.adapters.end(call.adapter)

    def take(self, call: ServerCall, reply: bytes, *, streamed: bool) -> None:
        """Check the reply to a piece and add it to its call."""
        checked = parse_reply(reply, vocab_size=self.vocab_size, url=self.url)
        if call.adapter is not None:
            checked = call.adapter.labelled(checked, self.url)
        call.assembly.take(checked, caller_aborted=call.caller_aborted, streamed=streamed, moved=call.moved)

    def payloads(self, call: ServerCall, body: bytes) -> AbstractAsyncContextManager[AsyncIterator[bytes]]:
        """Open the event stream of a piece."""
        return self._transport.events("/generate", body, max_bytes=_longest_reply(call))

    async def abandon(self, rid: str) -> None:
        """Abort a piece that has no reader any more; at a paused server, once it continues."""
        if self._gate is not None:
            self._abort_later.append(rid)
            return
        with anyio.move_on_after(ABORT_TIMEOUT_S, shield=True):
            await self._try_abort(rid)

    def _begin(self, request: GenerateRequest) -> ServerCall:
        check_request(request, self.vocab_size)
        rid = request.request_id
        if rid in self._calls:
            raise RequestRejected(f"request id {rid} is in use; each call needs its own uuid4 hex")
        call = self._calls[rid] = ServerCall(Assembly(request, self.url))
        return call

    def _end(self, call: ServerCall) -> None:
        del self._calls[call.assembly.request.request_id]
        call.wait = None  # it refers to the call, for its message: a cycle would keep the arrays until the next collection

    async def _piece(self, call: ServerCall) -> None:
        with self.deadline(call):
            body = await self.launch(call, stream=False)
            try:
                reply = await self._transport.call("POST", "/generate", body, max_bytes=_longest_reply(call))
            except RequestRejected as error:
                raise _explained(call, error) from error
            except anyio.get_cancelled_exc_class():
                await self.abandon(call.rid)
                raise
            finally:
                self.land(call)
            self.take(call, reply, streamed=False)
            call.rid = ""
        if call.dropped and not call.assembly.done:
            call.assembly.abort()

    async def _try_abort(self, rid: str) -> None:
        # Where it fails, the connection is closed or its call fails by itself: the abort only saves the server work.
        with anyio.move_on_after(ABORT_TIMEOUT_S), suppress(ServerError):
            await self._send_abort(rid)

    async def _send_abort(self, rid: str) -> None:
        await self._transport.call("POST", "/abort_request", orjson.dumps({"rid": rid}))

    def _waited(self, call: ServerCall) -> str:
        held = self._gate is not None and not call.rid
        where = "agentrl held it back, because the server is paused" if held else "it was at the server"
        request = call.assembly.request
        return (
            f"{self.url}: request {request.request_id} of episode {request.episode_id!r} ({request.context.size} tokens, "
            f"at most {request.sampling.max_new_tokens} more) got no answer; {where}"
        )


class Chunks(AsyncIterator[GenerationChunk]):
    """The chunks of one call. One task iterates it; `aclose` aborts an unfinished piece at the server."""

    def __init__(self, calls: ServerCalls, call: ServerCall) -> None:
        self._calls, self._call = calls, call
        self._emitted: list[int] = []
        self._kept = 0
        """Ids of finished pieces."""
        self._piece: AsyncExitStack | None = None
        self._events: AsyncIterator[bytes] | None = None

    # A cancelled `anext` leaves everything as it was, unless it cut the opening of a piece.
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
                await self._raise_dropped()

    async def _next(self) -> GenerationChunk | None:
        """Return the next chunk; None when a piece ended without new ids and the call continues."""
        if self._events is None:
            body = await self._calls.launch(self._call, stream=True)
            self._piece = AsyncExitStack()
            try:
                self._events = await self._piece.enter_async_context(self._calls.payloads(self._call, body))
            except RequestRejected as error:
                raise _explained(self._call, error) from error
        try:
            return await self._next_event(self._events)
        except RequestRejected as error:
            raise _explained(self._call, error) from error

    async def _next_event(self, events: AsyncIterator[bytes]) -> GenerationChunk | None:
        payload = await anext(events, None)
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

    async def _raise_dropped(self) -> None:
        await self.aclose()
        raise ServerUnavailable(
            f"{self._calls.url}: the stream of request {self._call.assembly.request.request_id} was aborted before the "
            f"server reported the log-probs of its last {len(self._emitted) - self._kept} ids",
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
        """End the call, even if cancelled; an unfinished piece is aborted at the server."""
        if self._call.rid:
            rid = self._call.rid
            await self._close_piece()
            await self._calls.abandon(rid)
