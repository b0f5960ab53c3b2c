"""The backend of a rollout worker: each model call goes to the driver over the worker's stream.

Invariant: the driver's pool answers every call, so routing, failover, versions and spot checks are those of a local episode.
A call ends with the driver's answer, with the driver's error, or with a message to the driver that aborts it. Another
message has the driver answer early.
"""

from __future__ import annotations

import itertools
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from dataclasses import asdict
from typing import TypeAlias

import anyio
import msgspec
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from agentrl.errors import AgentRLError, InvariantError, ServerError, error_named
from agentrl.inference.backend import GenerateRequest, Generation, GenerationChunk
from agentrl.rollout.remote.frames import (
    AbortCall,
    CallAnswered,
    CallFailed,
    CallPiece,
    GiveUpCall,
    ModelCall,
    ToDriver,
    bytes_ids,
    unpack_generation,
)

CallMessage: TypeAlias = CallPiece | CallAnswered | CallFailed


class DriverBackend:
    """A `Backend` whose calls the driver answers."""

    def __init__(self, send: Callable[[ToDriver], None]) -> None:
        self._send = send
        self._numbers = itertools.count()
        self._waiting: dict[int, MemoryObjectSendStream[CallMessage]] = {}
        self._by_request: dict[str, int] = {}

    async def generate(self, request: GenerateRequest) -> Generation:
        """Return the driver's completion of `request`.

        Cancellation: the driver aborts the call.
        """
        with self._call(request, streamed=False) as messages:
            last = await messages.receive()
            if isinstance(last, CallPiece):
                raise InvariantError(f"model call {request.request_id} is not streamed, but the driver sent a piece of it")
            return _completed(last)

    def stream(self, request: GenerateRequest) -> AbstractAsyncContextManager[AsyncIterator[GenerationChunk]]:
        """Yield the completion as the driver gets it; leaving the block early aborts it."""
        return self._stream(request)

    async def give_up(self, request_id: str) -> None:
        """Have the driver end a call with the tokens it has."""
        number = self._by_request.get(request_id)
        if number in self._waiting:
            self._send(GiveUpCall(number))

    def deliver(self, message: CallMessage) -> None:
        """Pass a message of the driver to its call; it is dropped if that call was aborted."""
        # The driver may have sent this before it read the abort of the call.
        waiting = self._waiting.get(message.call)
        if waiting is None:
            return
        waiting.send_nowait(message)
        if not isinstance(message, CallPiece):
            del self._waiting[message.call]

    @asynccontextmanager
    async def _stream(self, request: GenerateRequest) -> AsyncGenerator[AsyncIterator[GenerationChunk]]:
        with self._call(request, streamed=True) as messages:
            yield _DriverChunks(messages)

    @contextmanager
    def _call(self, request: GenerateRequest, *, streamed: bool) -> Generator[MemoryObjectReceiveStream[CallMessage]]:
        """Send a call and yield where its messages arrive; abort it where the block ends before the last of them."""
        number = next(self._numbers)
        # No bound is needed: a server sends as many pieces as the call samples tokens at most.
        sending, messages = anyio.create_memory_object_stream[CallMessage](float("inf"))
        with sending, messages:
            self._waiting[number], self._by_request[request.request_id] = sending, number
            try:
                self._send(
                    ModelCall(
                        call=number,
                        request_id=request.request_id,
                        episode_id=request.episode_id,
                        context=request.context,
                        sampling=msgspec.json.encode(asdict(request.sampling)).decode(),
                        streamed=streamed,
                    )
                )
                yield messages
            finally:
                self._by_request.pop(request.request_id, None)
                # Still registered: the driver has not answered, and its server would go on sampling in vain.
                if self._waiting.pop(number, None) is not None:
                    self._send(AbortCall(number))


class _DriverChunks(AsyncIterator[GenerationChunk]):
    """The chunks of one call; a cancelled `anext` loses none."""

    def __init__(self, messages: MemoryObjectReceiveStream[CallMessage]) -> None:
        self._messages = messages
        self._has_ended = False

    async def __anext__(self) -> GenerationChunk:
        if self._has_ended:
            raise StopAsyncIteration
        message = await self._messages.receive()
        if isinstance(message, CallPiece):
            return GenerationChunk(output_ids=bytes_ids(message.output_ids))
        self._has_ended = True
        new_ids = b"" if isinstance(message, CallFailed) else message.new_ids
        return GenerationChunk(generation=_completed(message), output_ids=bytes_ids(new_ids))


def _completed(last: CallAnswered | CallFailed) -> Generation:
    if isinstance(last, CallFailed):
        raise _call_error(last)
    return unpack_generation(last.generation)


def failed_call(call: int, error: AgentRLError) -> CallFailed:
    """Return the message that raises `error` in the worker."""
    if not isinstance(error, ServerError):
        return CallFailed(call, type(error).__name__, str(error))
    return CallFailed(call, type(error).__name__, str(error), error.status, error.url, error.retry_after_s)


def _call_error(failed: CallFailed) -> AgentRLError:
    error = rollout_error(failed.kind, failed.message)
    if isinstance(error, ServerError):
        error.status, error.url, error.retry_after_s = failed.status, failed.url, failed.retry_after_s
    return error


def rollout_error(kind: str, message: str) -> AgentRLError:
    """Return the error that the other process names; an `InvariantError` is raised if agentrl does not have it."""
    error = error_named(kind, message)
    if error is None:
        raise InvariantError(f"a rollout message names {kind!r} as an error, which agentrl does not have: {message}")
    return error
