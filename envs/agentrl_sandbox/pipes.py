"""The pipes of a sandbox's process, and the wait for its end.

Invariant: the process is started by the thread of the event loop. The kernel ends a sandbox together with the thread that
started it, and the threads of a pool come and go.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Final

import anyio

from agentrl.support.concurrency import task_group

PIPE_BYTES = 65_536
_RESTORED: Final = frozenset((13, 25, 32, 33))
"""SIGPIPE and SIGXFSZ, which Python ignores and `subprocess` restores; and two of the C library's own, which it ignores in a
process of `posix_spawn`, as a child of make is, and which nobody can set."""
_RESET: Final = """
import os, signal, sys
for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
    signal.signal(number, signal.SIG_DFL)
signal.pthread_sigmask(signal.SIG_SETMASK, ())
os.execvp(sys.argv[1], sys.argv[1:])
"""
"""Becomes a program that ignores and blocks no signal. A shell cannot: it leaves ignored what was ignored at its start."""


class PipeReader:
    """Reads from a process by a descriptor that becomes non-blocking; only `receive` loses no bytes when it is cancelled."""

    def __init__(self, descriptor: int) -> None:
        os.set_blocking(descriptor, False)
        self._descriptor = descriptor

    async def receive(self) -> bytes:
        """Return the next bytes, or none at the end."""
        while True:
            try:
                return os.read(self._descriptor, PIPE_BYTES)
            except BlockingIOError:
                await anyio.wait_readable(self._descriptor)

    async def receive_exactly(self, count: int) -> bytes:
        """Return `count` bytes, or fewer at the end."""
        data = bytearray()
        while len(data) < count:
            try:
                piece = os.read(self._descriptor, min(PIPE_BYTES, count - len(data)))
            except BlockingIOError:
                await anyio.wait_readable(self._descriptor)
                continue
            if not piece:
                break
            data += piece
        return bytes(data)

    async def receive_line(self) -> bytes:
        """Return the bytes up to the next end of a line, that one included, and take none after it."""
        line = bytearray()
        while not line.endswith(b"\n") and (piece := await self.receive_exactly(1)):
            line += piece
        return bytes(line)

    def receive_nowait(self) -> bytes:
        """Return what is there, perhaps nothing."""
        data = bytearray()
        with suppress(BlockingIOError):
            while piece := os.read(self._descriptor, PIPE_BYTES):
                data += piece
        return bytes(data)

    def close(self) -> None:
        """Close the descriptor; a second call does nothing."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


class PipeWriter:
    """Writes to a process by a descriptor that becomes non-blocking."""

    def __init__(self, descriptor: int) -> None:
        os.set_blocking(descriptor, False)
        self._descriptor = descriptor

    async def send(self, data: bytes) -> None:
        """Write all of `data`; a process that reads no more is a BrokenPipeError."""
        view = memoryview(data)
        while view:
            try:
                view = view[os.write(self._descriptor, view[:PIPE_BYTES]) :]
            except BlockingIOError:
                await anyio.wait_writable(self._descriptor)

    def close(self) -> None:
        """Close the descriptor; a second call does nothing."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


class PipedProcess:
    """A process with three pipes. Its starter calls `kill` and `close`, in this order, also after an error.

    It has exactly the given environment, no descriptors but its pipes and `descriptors`, and ignores no signal. The pipes
    belong to the user `owner`, who may then open them by name, as `/dev/stdout`; None: to this process's own.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str],
        descriptors: Sequence[int] = (),
        directory: str | None = None,
        owner: int | None = None,
    ) -> None:
        self._process = subprocess.Popen(
            [*_signal_reset(), *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            env=environment,
            pass_fds=descriptors,
            cwd=directory,
            start_new_session=True,
        )
        self.pid = self._process.pid
        self._ended = os.pidfd_open(self.pid)
        self._one_waits = anyio.Lock()
        """An event loop watches a descriptor for one task, and both a session's call and its watch may kill."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self.stdin = PipeWriter(os.dup(self._process.stdin.fileno()))
        self.stdout = PipeReader(os.dup(self._process.stdout.fileno()))
        self.stderr = PipeReader(os.dup(self._process.stderr.fileno()))
        for stream in (self._process.stdin, self._process.stdout, self._process.stderr):
            if owner is not None:
                os.fchown(stream.fileno(), owner, owner)
            stream.close()

    async def wait(self) -> int:
        """Wait for the end, and return the exit status, or the negative number of the signal."""
        async with self._one_waits:
            if self._process.returncode is None:
                await anyio.wait_readable(self._ended)
            return self._process.wait()

    def has_ended(self) -> bool:
        """Return whether the process has ended."""
        return self._process.poll() is not None

    def kill(self) -> None:
        """Send SIGKILL to this process alone."""
        self._process.kill()

    def close(self) -> None:
        """Close the pipes; the process has ended."""
        for pipe in (self.stdin, self.stdout, self.stderr):
            pipe.close()
        ended, self._ended = self._ended, -1
        if ended >= 0:
            os.close(ended)


@asynccontextmanager
async def process_pipe(command: Sequence[str], *, environment: Mapping[str, str]) -> AsyncGenerator[PipedProcess]:
    """Start a process, yield it, and kill it at the block's end; what it says on standard error is not kept.

    Raises:
        OSError: the command cannot be started.
    """
    process = PipedProcess(command, environment=environment)
    try:
        async with task_group() as tasks:
            tasks.start_soon(_forget, process.stderr)
            yield process
            tasks.cancel_scope.cancel()
    finally:
        process.kill()
        with anyio.CancelScope(shield=True):
            await process.wait()
        process.close()


async def _forget(reader: PipeReader) -> None:
    while await reader.receive():
        pass


class PipedBox:
    """A box of one process; its backend limits memory and files."""

    def __init__(self, process: PipedProcess) -> None:
        self.stdin, self.stdout, self.stderr = process.stdin, process.stdout, process.stderr
        self._process = process
        self._is_dead = False

    async def wait(self) -> int:
        """Wait for the program's end, and return its exit status, 128 + N after signal N."""
        code = await self._process.wait()
        return code if code >= 0 else 128 - code

    async def look(self) -> None:
        """Return nothing."""


def _signal_reset() -> tuple[str, ...]:
    """Return the words before a command that make it ignore no signal; none where this thread ignores and blocks none.

    A shell that starts a process in the background makes it ignore SIGINT and SIGQUIT, and `nohup` SIGHUP.
    """
    lines = dict(line.split(":", 1) for line in Path("/proc/thread-self/status").read_text().splitlines())
    ignored, blocked = (int(lines[name], 16) for name in ("SigIgn", "SigBlk"))
    for number in _RESTORED:
        ignored &= ~(1 << (number - 1))
    if not ignored and not blocked:
        return ()
    if os.access(sys.executable, os.X_OK):
        return (sys.executable, "-I", "-S", "-c", _RESET)
    return ("/usr/bin/env", "--default-signal")  # a process that gave up the rights which its Python needs
