"""Pieces that the first processes of a session and of a warm start share: messages to the host, and a program's outputs.

Invariant: one request, one reply, both JSON with their length before them.
"""

from __future__ import annotations

import base64
import ctypes
import fcntl
import json
import os
import select
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

CHUNK = 65_536
Reply = dict[str, Any]


class Capture:
    """The outputs of a process, up to a limit each; the descriptors become non-blocking."""

    def __init__(self, descriptors: Iterable[int], limit: int) -> None:
        self.pipes = {descriptor: bytearray() for descriptor in descriptors}
        self.limit = limit
        self.is_over = False
        for descriptor in self.pipes:
            os.set_blocking(descriptor, False)

    def read(self, descriptor: int) -> bool:
        """Read once; return False at the end or when nothing is there."""
        try:
            data = os.read(descriptor, CHUNK)
        except BlockingIOError:
            return False
        kept = self.pipes[descriptor]
        room = self.limit - len(kept)
        kept += data[:room]
        self.is_over = self.is_over or len(data) > room
        return bool(data)

    def drain(self) -> None:
        """Read what is there now, and no more than twice the limit: a job in the background may write for ever."""
        for descriptor in self.pipes:
            most = 2 * self.limit // CHUNK + 2
            while most and self.read(descriptor):
                most -= 1

    def texts(self) -> list[str]:
        """Return standard output and standard error as base64."""
        return [base64.b64encode(kept).decode() for kept in self.pipes.values()]


def reply_at_end(ended: str, code: int, capture: Capture) -> Reply:
    """Return the reply for a program that ended with `code`, its exit status or the negative number of the signal."""
    stdout, stderr = capture.texts()
    reply: Reply = {"ended": ended, "stdout": stdout, "stderr": stderr}
    if ended == "exited":
        reply |= {"exit_status": code} if code >= 0 else {"ended": "killed", "signal": -code}
    return reply


def open_end(pid: int) -> int:
    """Return a descriptor that can be read once a child of this process has ended; gVisor has none for processes."""
    with suppress(OSError):
        return os.pidfd_open(pid)
    reading, writing = os.pipe2(os.O_CLOEXEC)

    def wait() -> None:
        with suppress(ChildProcessError):
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        os.close(writing)

    threading.Thread(target=wait, daemon=True).start()
    return reading


def wait_for_end(ended: int, stdin: int, data: bytes, capture: Capture, timeout_s: float) -> str:
    """Feed and read a program until `ended` can be read or a limit is reached, and return why; closes `stdin`."""
    os.set_blocking(stdin, False)
    watched = {ended, *capture.pipes}
    deadline = time.monotonic() + timeout_s
    try:
        while True:
            if not data and stdin >= 0:
                os.close(stdin)
                stdin = -1
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return "timeout"
            ready, writable, _ = select.select(watched, [stdin] if data else [], [], left_s)
            if writable:
                data = write_some(stdin, data)
            for descriptor in ready:
                if descriptor != ended and not capture.read(descriptor):
                    watched.discard(descriptor)
            if capture.is_over:
                return "output"
            if ended in ready:
                return "exited"
    finally:
        if stdin >= 0:
            os.close(stdin)


def write_some(descriptor: int, data: bytes) -> bytes:
    """Write what a non-blocking pipe takes, and return the rest; nothing is left for a reader that has gone."""
    try:
        return data[os.write(descriptor, data[:CHUNK]) :]
    except BlockingIOError:
        return data
    except BrokenPipeError:
        return b""


def answer_host(start: Callable[[], Callable[[dict[str, Any]], Reply]]) -> None:
    """Answer the requests on standard input with what `start` returns, until they end; programs get no way to the host."""
    requests, replies = (fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, 10) for number in (0, 1))
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    answer = start()
    reply: Reply = {"ready": True}
    is_hidden = False
    while True:
        data = json.dumps(reply).encode()
        view = memoryview(struct.pack(">I", len(data)) + data)
        while view:
            view = view[os.write(replies, view) :]
        [length] = struct.unpack(">I", _read_exactly(requests, 4))
        request = json.loads(_read_exactly(requests, length))
        if not is_hidden:
            hide()  # not before the host has looked at it
            is_hidden = True
        reply = answer(request)


def hide() -> None:
    """Keep this process's memory and descriptors from other processes of the same user."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE


def _read_exactly(descriptor: int, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        piece = os.read(descriptor, count - len(data))
        if not piece:
            sys.exit(0)
        data += piece
    return bytes(data)
