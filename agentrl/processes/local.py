"""Starts processes on this machine.

Invariant: each process has a session of its own, so that it ends together with those that it started, and a Ctrl-C in the
terminal reaches only the driver. The kernel closes its standard input when the driver ends, even by SIGKILL.
"""

from __future__ import annotations

import fcntl
import os
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from pathlib import Path
from subprocess import PIPE, STDOUT
from typing import BinaryIO

import anyio
from anyio.abc import ByteReceiveStream, ByteSendStream, Process

from agentrl.errors import ConfigError, LaunchError
from agentrl.folders import make_private
from agentrl.processes.base import DRAIN_S, PORT_WORD, STOP_S, TOKEN_VARIABLE, Exit, ProcessSpec, describe_code, read_tail
from agentrl.processes.machine import LOOPBACK, free_port

MAX_LINE = 65_536
"""Bytes of a line; the beginning of a longer one is left out, so that output without an end fills no memory."""
_REAP_S = 2.0
"""Seconds that a killed process gets to end."""


class LocalLauncher:
    """Starts processes on this machine; a `Launcher`. It reserves no cores and no GPUs."""

    elsewhere = False

    async def reserves_gpus(self) -> bool:
        return False

    async def start(self, specs: Sequence[ProcessSpec]) -> Sequence[LocalChild]:
        """Start all of `specs` or none.

        Cancellation: takes effect at the caller's next wait, when the caller has the processes and can stop them.
        """
        started: list[LocalChild] = []
        try:
            with anyio.CancelScope(shield=True):  # a start that is cut short leaves what its process has started
                for spec in specs:
                    started.append(await _start(spec))  # noqa: PERF401 - those before a failure must be known
        except BaseException:
            with anyio.CancelScope(shield=True):
                for child in started:
                    await child.reap()
            raise
        return started


class LocalChild:
    """A process on this machine; a `Child`."""

    host = LOOPBACK

    def __init__(self, spec: ProcessSpec, process: Process, port: int) -> None:
        self.spec = spec
        self.port = port
        self.pid: int = process.pid
        self.where = f"pid {process.pid}"
        self._process = process
        self._output: OutputLines | None = None

    @property
    def stdin(self) -> ByteSendStream:
        """Standard input; a process that ends with it ends when it is closed."""
        assert self._process.stdin is not None
        return self._process.stdin

    @property
    def stdout(self) -> ByteReceiveStream:
        """Standard output, as bytes; for callers that do not read `lines`."""
        assert self._process.stdout is not None
        return self._process.stdout

    async def ended(self) -> Exit:
        """Wait until the process has ended, and `DRAIN_S` at most until the reader of its `lines` has the last ones."""
        code = await self._process.wait()
        if self._output is not None:
            with anyio.move_on_after(DRAIN_S):  # what it started may hold the pipe open
                await self._output.at_end.wait()
        return Exit(code=code, reason=describe_code(code), log_tail=read_tail(self.spec.log_path))

    async def log_tail(self) -> str:
        return read_tail(self.spec.log_path)

    def kill(self) -> None:
        _signal_group(self.pid, signal.SIGKILL)

    async def reap(self) -> None:
        """Kill the process group and wait until the process has ended, at most 2 seconds."""
        self.kill()
        with anyio.move_on_after(_REAP_S):
            await self._process.aclose()

    async def stop(self) -> None:
        with anyio.CancelScope(shield=True):
            _signal_group(self.pid, signal.SIGTERM)
            with anyio.move_on_after(STOP_S):
                await self._process.wait()
            await self.reap()

    def lines(self) -> AsyncIterator[str]:
        self._output = OutputLines(self.stdout, self.spec.log_path)
        return self._output


class OutputLines:
    """The lines of a byte stream; what is read is appended to a log at once, whole lines or not."""

    def __init__(self, stream: ByteReceiveStream, log_path: Path) -> None:
        self.at_end = anyio.Event()
        """Set once the log has everything that the stream will give."""
        self._stream, self._log_path = stream, log_path
        self._lines: list[bytes] = []
        self._rest = b""

    def __aiter__(self) -> AsyncIterator[str]:
        return self

    async def __anext__(self) -> str:
        while not self._lines:
            try:
                data = await self._stream.receive()
            except (anyio.EndOfStream, anyio.ClosedResourceError, anyio.BrokenResourceError):
                self.at_end.set()
                raise StopAsyncIteration from None
            with self._log_path.open("ab") as log:
                log.write(data)
            *self._lines, rest = (self._rest + data).split(b"\n")
            self._rest = rest[-MAX_LINE:]
        return self._lines.pop(0).decode(errors="replace")


def open_log(path: Path) -> BinaryIO:
    """Return a log, open for appending and locked for the process that gets it; ConfigError: it cannot be written."""
    try:
        make_private(path.parent)
        log = path.open("ab")
        with suppress(OSError):  # a file system without locks
            fcntl.flock(log, fcntl.LOCK_SH)  # goes to the process with the file, and ends with it
        return log
    except OSError as error:
        raise ConfigError(f"cannot write the log {path}: {error.strerror}") from error


def inherited_environment() -> dict[str, str]:
    """Return the driver's environment for a process: all but the token, which opens the driver to its owner."""
    return {name: value for name, value in os.environ.items() if name != TOKEN_VARIABLE}


async def _start(spec: ProcessSpec) -> LocalChild:
    port = free_port(LOOPBACK) if any(PORT_WORD in word for word in spec.command) else 0
    command = spec.command_on(LOOPBACK, port)
    with open_log(spec.log_path) as log:
        try:
            process = await anyio.open_process(
                command,
                stdin=PIPE,
                stdout=PIPE,
                stderr=STDOUT if spec.role == "server" else log,
                env={**inherited_environment(), **spec.environment},
                start_new_session=True,
            )
        except OSError as error:
            raise LaunchError(f"cannot start {command[0]} for {spec.name}: {error}") from error
    return LocalChild(spec, process, port)


def _signal_group(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)
