"""A trainer worker's end of its streams: requests in, replies and heartbeats out.

Invariant: each request gets one reply, which carries its number. Threads share the stream of replies without mixing frames.
"""

from __future__ import annotations

import os
import queue
import threading
import traceback
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from typing import BinaryIO, NamedTuple

from agentrl.errors import AgentRLError, TrainError
from agentrl.trainer.worker import protocol

BEAT_S = 2.0
"""Seconds between two heartbeats of a worker that works on a request."""


class NumberedCall(NamedTuple):
    """A request as it came in."""

    number: int
    request: protocol.WorkerRequest


class Replies:
    """The stream to the driver; threads may share it."""

    def __init__(self, stream: BinaryIO, beat_s: float) -> None:
        """Write to `stream`, and a heartbeat every `beat_s` seconds while a request is worked on."""
        self._stream, self._beat_s = stream, beat_s
        self._lock = threading.Lock()

    def answer(self, call: NumberedCall, action: Callable[[protocol.WorkerRequest], protocol.WorkerReply]) -> None:
        """Write what `action` returns for the request, or its error of `agentrl.errors`; heartbeats precede it."""
        try:
            with self.heartbeats():
                reply = action(call.request)
        except AgentRLError as error:
            reply = protocol.Failed(type(error).__name__, str(error))
        self._write(protocol.encode_frame(reply, call.number))

    @contextmanager
    def heartbeats(self) -> Generator[None]:
        """Write heartbeats from a thread while the block runs."""
        done = threading.Event()

        def beat() -> None:
            with suppress(OSError):  # the driver has ended; the reply meets the same error
                while not done.wait(self._beat_s):
                    self._write(protocol.HEARTBEAT)

        thread = threading.Thread(target=beat, name="agentrl heartbeat", daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()

    def _write(self, frame: bytes) -> None:
        with self._lock:
            self._stream.write(frame)
            self._stream.flush()


class Requests:
    """Reads requests in a thread, so that some are answered while this thread works on another."""

    def __init__(self, stream: BinaryIO, aside: Callable[[NumberedCall], None]) -> None:
        """Read `stream`, and answer each `SendingRequest` by `aside`, in a thread of its own."""
        self._stream, self._aside = stream, aside
        self._calls: queue.SimpleQueue[NumberedCall | BaseException | None] = queue.SimpleQueue()
        threading.Thread(target=self._read, name="agentrl requests", daemon=True).start()

    def next(self) -> NumberedCall | None:
        """Wait for the next request that is not answered aside; None: the driver has closed the stream.

        Raises:
            InvariantError: the stream is not a sequence of frames.
            TrainError: it ended in the middle of one.
        """
        call = self._calls.get()
        if isinstance(call, BaseException):
            raise call
        return call

    def _read(self) -> None:
        try:
            while (call := read_request(self._stream)) is not None:
                if isinstance(call.request, protocol.SendingRequest):
                    threading.Thread(target=self._answer_aside, args=(call,), name="agentrl sending", daemon=True).start()
                else:
                    self._calls.put(call)
            self._calls.put(None)
        except BaseException as error:  # noqa: BLE001 - `next` raises it in the thread that can end the process
            self._calls.put(error)

    def _answer_aside(self, call: NumberedCall) -> None:
        try:
            with suppress(ConnectionError):  # the driver has ended, and with it the stream of requests
                self._aside(call)
        except BaseException:  # noqa: BLE001 - as in the main thread, what is no error of agentrl ends the process
            traceback.print_exc()
            os._exit(1)


def read_request(stream: BinaryIO) -> NumberedCall | None:
    """Read the next request; None at the end of the stream, or when the driver dismisses this rank.

    Raises:
        InvariantError: the stream is not a sequence of frames.
        TrainError: it ended in the middle of one.
    """
    header = stream.read(protocol.HEADER_BYTES)
    if not header or header == protocol.HEARTBEAT:
        return None
    body = _exactly(stream, protocol.body_length(header)) if len(header) == protocol.HEADER_BYTES else b""
    if not body:
        raise TrainError("the request stream ended in the middle of a frame: the driver has ended")
    return NumberedCall(protocol.request_number(header), protocol.decode_request(body))


def _exactly(stream: BinaryIO, count: int) -> bytes:
    body = stream.read(count)
    return body if len(body) == count else b""
