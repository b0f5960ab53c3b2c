"""Frames: the messages of every link between two processes, each behind its length.

Invariant: a length is checked before the body is read, so nothing that is sent fills the memory. The two ends decode a body
into one declared type or refuse it; nothing that is read can run code.

A frame is the length of the body, 8 bytes little-endian, and the body. An empty body is a heartbeat of the child, or
dismisses it.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Final, Protocol, TypeVar

import msgspec

from agentrl.errors import InvariantError

Message = TypeVar("Message")

PREFIX_BYTES: Final = 8
EMPTY_FRAME: Final = bytes(PREFIX_BYTES)
MAX_BODY_BYTES: Final = 1 << 30
"""Largest body: about 40 million tokens of a training batch."""
READ_BYTES: Final = 1 << 18
"""Bytes that one read takes at most."""


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
