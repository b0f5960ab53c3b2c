"""One process on a node, run by calls that come from the driver on another machine. No ray: a launcher wraps this class.

Invariant: each call may come in a thread of its own, and its result holds only numbers, text and bytes. The process has a
session of its own; when it has ended, so have those that it started. Its standard input closes when this process ends,
even by SIGKILL. Output that the driver has not read yet stays here; when it fills `MAX_UNREAD`, the process waits.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Literal

from agentrl.processes.base import DRAIN_S, HOST_WORD, PORT_WORD, STOP_S, TAIL_BYTES
from agentrl.processes.machine import free_port, interface_of

MAX_UNREAD = 1 << 20
"""Bytes of one stream that wait for the driver."""

StreamName = Literal["stdout", "stderr"]


class HostedProcess:
    """At most one process, which `start` starts."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._streams: dict[StreamName, UnreadOutput] = {"stdout": UnreadOutput(), "stderr": UnreadOutput()}
        self._readers: list[threading.Thread] = []
        self._tail = bytearray()
        # Guards the tail, which both readers extend.
        self._tail_lock = threading.Lock()

    def start(
        self, command: Sequence[str], environment: Mapping[str, str], *, host: str, folder: str, merged: bool
    ) -> tuple[int, int, str]:
        """Start the process; return its id, the port of `PORT_WORD` or 0, and the reason why it cannot be started, or "".

        An empty first word of `command` means the Python of this process. `environment` is added to that of this process,
        without Ray's variables. `folder` is the working directory, where it exists on this node. With `merged`, standard
        error joins standard output.
        """
        port = free_port(host) if any(PORT_WORD in word for word in command) else 0
        words = [word.replace(HOST_WORD, host).replace(PORT_WORD, str(port)) for word in command]
        try:
            self._process = subprocess.Popen(
                [words[0] or sys.executable, *words[1:]],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT if merged else subprocess.PIPE,
                env=node_environment(os.environ, host) | dict(environment),
                cwd=folder if os.path.isdir(folder) else None,
                start_new_session=True,
            )
        except OSError as error:
            return 0, port, str(error)
        self._read_in_thread("stdout", self._process.stdout)
        self._read_in_thread("stderr", self._process.stderr)
        return self._process.pid, port, ""

    def read(self, name: StreamName, offset: int) -> bytes:
        """Return what the process wrote to a stream from byte `offset` on, waiting for the first; nothing at the end.

        What is before `offset` is forgotten, so that a reader whose call was cancelled can ask for the same bytes again.
        """
        return self._streams[name].read(offset)

    def wait(self) -> tuple[int, str]:
        """Wait until the process has ended; return its exit code, negative for a signal, and the end of its output."""
        assert self._process is not None
        code = self._process.wait()
        self.signal(signal.SIGKILL)  # what it started
        for reader in self._readers:
            reader.join(DRAIN_S)
        if not any(reader.is_alive() for reader in self._readers):
            for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
                if pipe is not None:
                    pipe.close()
        return code, self.tail()

    def until_released(self) -> None:
        """Wait for ever: the caller learns that this process ends."""
        threading.Event().wait()

    def tail(self) -> str:
        with self._tail_lock:
            return bytes(self._tail).decode(errors="replace")

    def signal(self, number: int) -> None:
        """Send a signal to the process and those that it started; do nothing where all have ended."""
        if self._process is not None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, number)

    def stop(self) -> None:
        """End the process and those that it started by SIGTERM, after `STOP_S` by SIGKILL."""
        if self._process is None:
            return
        self.signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_S)
        self.signal(signal.SIGKILL)
        self._process.wait()

    def _read_in_thread(self, name: StreamName, stream: object) -> None:
        if stream is None:
            self._streams[name].close()
            return
        descriptor: int = stream.fileno()  # pyright: ignore[reportAttributeAccessIssue] - a pipe of Popen
        fill = threading.Thread(
            target=self._streams[name].fill, args=(descriptor, self._remember), name=f"agentrl {name}", daemon=True
        )
        fill.start()
        self._readers.append(fill)

    def _remember(self, data: bytes) -> None:
        with self._tail_lock:
            self._tail += data
            del self._tail[:-TAIL_BYTES]


class UnreadOutput:
    """The bytes of a stream that a reader elsewhere has not confirmed yet."""

    def __init__(self) -> None:
        self._data = bytearray()
        self._offset = 0
        """Position of the first byte of `_data` in the stream."""
        self._closed = False
        # Guards all of it, between the thread that fills and those that read.
        self._changed = threading.Condition()

    def fill(self, descriptor: int, copy: Callable[[bytes], None]) -> None:
        """Take what comes from `descriptor` until it ends; wait while `MAX_UNREAD` bytes are unread."""
        try:
            while data := os.read(descriptor, 65_536):
                copy(data)
                with self._changed:
                    self._changed.wait_for(lambda: len(self._data) < MAX_UNREAD)
                    self._data += data
                    self._changed.notify_all()
        finally:
            self.close()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def read(self, offset: int) -> bytes:
        """Forget what is before `offset`; return what is after it, waiting for the first byte or the end."""
        with self._changed:
            confirmed = max(0, offset - self._offset)
            del self._data[:confirmed]
            self._offset += confirmed
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._data or self._closed)
            return bytes(self._data)


def node_environment(inherited: Mapping[str, str], host: str) -> dict[str, str]:
    """Return the environment of a node without Ray's variables, with the network interface that has `host`.

    Without the latter, gloo and NCCL may listen where ranks on other nodes do not reach them.
    """
    environment = {name: value for name, value in inherited.items() if not name.startswith("RAY_")}
    interface = interface_of(host)
    if interface is not None:
        environment.setdefault("GLOO_SOCKET_IFNAME", interface)
        environment.setdefault("NCCL_SOCKET_IFNAME", interface)
    return environment
