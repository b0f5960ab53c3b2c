"""Frames: the messages of every link between two processes, each behind its length; and a child's end of its link.

Invariant: a length is checked before the body is read, so nothing that is sent fills the memory. The two ends decode a body
into one declared type or refuse it; nothing that is read can run code.

A frame is the length of the body, 8 bytes little-endian, and the body. An empty body is a heartbeat of the child, or
dismisses it.

In a child, threads read and write, so that the end of the parent is noticed and heartbeats go out whatever the main thread
does. Nothing here depends on pipes alone: a pipe to a child stays open as long as any process holds its other end, such as a
pool of processes that a workflow forked.
"""

from __future__ import annotations

import io
import os
import select
import threading
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager, suppress
from queue import Empty, SimpleQueue
from typing import BinaryIO, Final, Protocol, TypeVar

import msgspec

from agentrl.errors import InvariantError

Message = TypeVar("Message")

PREFIX_BYTES: Final = 8
EMPTY_FRAME: Final = bytes(PREFIX_BYTES)
MAX_BODY_BYTES: Final = 1 << 30
"""Largest body: about 40 million tokens of a training batch."""
READ_BYTES: Final = 1 << 18
"""Bytes that one read takes at most."""
BEAT_S = 2.0
"""Seconds between two heartbeats of a child that works and has nothing to say."""


class ByteSource(Protocol):
    """A stream that a thread reads, such as an `io.BufferedReader`."""

    def read1(self, size: int, /) -> bytes:
        """Return the bytes that have come, at most `size`; wait for the first one. Empty: the end."""
        ...


def framed(body: bytes) -> bytes:
    """Return `body` as a frame."""
    return len(body).to_bytes(PREFIX_BYTES, "little") + body


def decoded(decoder: msgspec.msgpack.Decoder[Message], body: bytes, what: str) -> Message:
    """Return the message in `body`; raises InvariantError, with the expectation `what`, where it is none."""
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvariantError(f"not {what}: {error}") from error


class FrameBuffer:
    """Cuts a stream of bytes into the bodies of frames.

    Example:
        >>> buffer = FrameBuffer()
        >>> data = framed(b"one") + framed(b"two")
        >>> buffer.cut(data[:13]), buffer.cut(data[13:])
        ([b'one'], [b'two'])
    """

    def __init__(self, max_bytes: int = MAX_BODY_BYTES) -> None:
        self.max_bytes = max_bytes
        self._data = bytearray()

    @property
    def is_empty(self) -> bool:
        """Whether no frame has begun."""
        return not self._data

    def cut(self, data: bytes) -> list[bytes]:
        """Add bytes, and return the bodies that are whole; raises InvariantError for a length over the limit."""
        self._data += data
        bodies: list[bytes] = []
        start = 0
        while len(self._data) - start >= PREFIX_BYTES:
            begin = start + PREFIX_BYTES
            length = int.from_bytes(self._data[start:begin], "little")
            if length > self.max_bytes:
                raise InvariantError(
                    f"a frame header announces {length} bytes, but at most {self.max_bytes} are allowed; the stream is not "
                    "one of frames"
                )
            if len(self._data) - begin < length:
                break
            start = begin + length
            with memoryview(self._data) as view:
                bodies.append(bytes(view[begin:start]))
        del self._data[:start]
        return bodies


def read_frames(source: ByteSource, max_bytes: int = MAX_BODY_BYTES) -> Generator[bytes]:
    """Yield the bodies that come from `source`, until it ends.

    Raises:
        ConnectionError: the stream was reset, or ended in the middle of a frame.
    """
    buffer = FrameBuffer(max_bytes)
    while data := source.read1(READ_BYTES):
        yield from buffer.cut(data)
    if not buffer.is_empty:
        raise ConnectionResetError("the stream ended in the middle of a frame: the other process has ended")


def open_parent() -> int | None:
    """Return a descriptor that becomes readable when the parent process ends; None where the system has none.

    Unlike PR_SET_PDEATHSIG it follows the process, not the thread that started this one.
    """
    try:
        return os.pidfd_open(os.getppid())
    except (AttributeError, OSError):  # another system, or a container that forbids it
        return None


class ParentPipe(io.RawIOBase):
    """A pipe from the parent: it also ends when the parent has ended while others still hold its writing end."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor, self._parent = descriptor, open_parent()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray | memoryview) -> int:  # pyright: ignore[reportIncompatibleMethodOverride] - no wider buffer comes
        """Read what there is into `buffer`, waiting for the first byte; return 0 at the end."""
        if self._parent is not None:
            # A grandchild may hold the writing end open, and then the pipe alone never tells that the parent has died.
            ready, _, _ = select.select([self._descriptor, self._parent], [], [])
            if self._descriptor not in ready:
                return 0
        return os.readv(self._descriptor, [buffer])


def take_standard_streams() -> tuple[ByteSource, BinaryIO]:
    """Return standard input, which ends with the parent, and standard output.

    Other code of this process, native libraries included, then reads nothing and prints to standard error.
    """
    source, sink = io.BufferedReader(ParentPipe(os.dup(0))), os.fdopen(os.dup(1), "wb")
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    # From now on a stray print of any library goes to the log, not between two frames.
    os.dup2(2, 1)
    return source, sink


def read_in_thread(
    frames: Iterable[bytes], take: Callable[[bytes], None], ended: Callable[[BaseException | None], None]
) -> threading.Thread:
    """Pass `frames` to `take` in a thread, which then calls `ended` with the error, if any; a parent's death is none."""

    def read() -> None:
        problem = None
        try:
            for body in frames:
                take(body)
        except ConnectionError:  # a parent that is killed with unread replies resets its connection
            pass
        except BaseException as error:  # noqa: BLE001 - `ended` decides about it
            problem = error
        ended(problem)

    thread = threading.Thread(target=read, name="agentrl link reader", daemon=True)
    thread.start()
    return thread


class FrameWriter:
    """Writes frames to the parent from a thread, in the order of the calls of `send`, which any thread may call."""

    def __init__(self, stream: BinaryIO, beat_s: float = BEAT_S) -> None:
        self._stream, self._beat_s = stream, beat_s
        self._working = 0
        self._lock = threading.Lock()
        # Without a bound: who sends a message waits for the answer of the parent, so few messages are here.
        self._frames: SimpleQueue[bytes | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._write, name="agentrl link writer", daemon=True)
        self._thread.start()

    def send(self, body: bytes) -> None:
        """Write `body` after those before it."""
        self._frames.put(framed(body))

    @contextmanager
    def beating(self) -> Generator[None]:
        """Write heartbeats while the block runs."""
        self._count_work(1)
        self._frames.put(b"")  # wakes the thread
        try:
            yield
        finally:
            self._count_work(-1)

    def close(self) -> None:
        """Return when every frame is written, or when nothing reads them any more."""
        self._frames.put(None)
        self._thread.join()

    def _count_work(self, change: int) -> None:
        with self._lock:
            self._working += change

    def _write(self) -> None:
        frame: bytes | None = b""
        try:
            while frame is not None:
                frame = self._next()
                # All that waits goes out in one write: a rollout worker sends thousands of small messages a second.
                frames = [frame or b""]
                with suppress(Empty):
                    while frame is not None:
                        frame = self._frames.get_nowait()
                        frames.append(frame or b"")
                self._stream.write(b"".join(frames))
                self._stream.flush()
        except (ConnectionError, ValueError):  # the parent has ended, and the reader ends this process; or it is closed
            with suppress(ConnectionError):
                self._stream.close()

    def _next(self) -> bytes | None:
        while self._working:
            with suppress(Empty):
                return self._frames.get(timeout=self._beat_s)
            if self._working:
                return EMPTY_FRAME
        return self._frames.get()
