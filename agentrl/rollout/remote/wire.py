"""Worker processes on this machine, and what the driver needs of any worker: a stream of bytes in each direction.

Invariant: no process outlives the block that started it, nor do the programs that it started.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from pathlib import Path
from subprocess import PIPE
from typing import Protocol, TypeAlias

import anyio
from anyio.abc import ByteStream, Process

from agentrl.cluster.local import inherited_environment
from agentrl.errors import RunStopped
from agentrl.foreign import visible

LEAVE_S = 4.0
"""Seconds that a worker gets to end by itself after its input is closed."""
KILL_S = 1.0
"""Seconds that a killed worker gets to end."""
_READ_BYTES = 1 << 18
_TAIL_BYTES = 4_000


class Wire(Protocol):
    """The connection with one worker."""

    shares_clock: bool
    """Whether `time.perf_counter` of the worker is that of the driver, as on one machine."""

    async def send(self, data: bytes) -> None:
        """Write all of `data`.

        Raises:
            anyio.BrokenResourceError, anyio.ClosedResourceError: the worker has ended.

        Cancellation: part of it is written.
        """
        ...

    async def receive(self) -> bytes:
        """Return the next bytes.

        Raises:
            anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError: the worker has ended.

        Cancellation: nothing is lost.
        """
        ...

    async def obituary(self) -> str:
        """Wait for the end of the worker, which has closed its stream, and return how it ended, with its log's tail.

        Cancellation: nothing is left behind.
        """
        ...


StartWorker: TypeAlias = Callable[[str, Path], AbstractAsyncContextManager[Wire]]
"""Starts the worker of a name, which logs to a file; it ends with the block."""


class ProcessWire:
    """A process of this machine, with pipes."""

    shares_clock = True

    def __init__(self, process: Process, log_path: Path) -> None:
        """Speak to `process`, whose log is `log_path`."""
        self._process, self._log_path = process, log_path

    async def send(self, data: bytes) -> None:
        """Write all of `data`; see `Wire`."""
        assert self._process.stdin is not None
        await self._process.stdin.send(data)

    async def receive(self) -> bytes:
        """Return the next bytes; see `Wire`."""
        assert self._process.stdout is not None
        return await self._process.stdout.receive(_READ_BYTES)

    async def obituary(self) -> str:
        """Return how the process ended; see `Wire`."""
        with anyio.move_on_after(KILL_S):
            await self._process.wait()
        code = self._process.returncode
        how = "its output is closed, but it still runs" if code is None else f"exit code {code}"
        return f"pid {self._process.pid}, {how}; the end of {self._log_path}:\n{_tail(self._log_path)}"


class StreamWire:
    """A connection with a worker on any node."""

    shares_clock = False

    def __init__(self, stream: ByteStream, obituary: Callable[[], Awaitable[str]]) -> None:
        """Speak over `stream`; `obituary` waits for the end of the worker and returns how it ended."""
        self._stream, self._obituary = stream, obituary

    async def send(self, data: bytes) -> None:
        """Write all of `data`; see `Wire`."""
        await self._stream.send(data)

    async def receive(self) -> bytes:
        """Return the next bytes; see `Wire`."""
        return await self._stream.receive(_READ_BYTES)

    async def obituary(self) -> str:
        """Return how the worker ended; see `Wire`."""
        return await self._obituary()


@asynccontextmanager
async def local_worker(_name: str, log_path: Path) -> AsyncGenerator[ProcessWire]:
    """Yield a worker process of this machine, which appends its output to `log_path`.

    Raises:
        RunStopped: the process cannot be started.

    Cancellation: its input is closed, so that it ends by itself; after `LEAVE_S` it is killed.
    """
    command = [sys.executable, "-P", "-m", "agentrl.rollout.remote.process"]
    try:
        log_path.parent.mkdir(parents=True, exist_ok=True)
        with log_path.open("ab") as log:
            process = await anyio.open_process(
                command,
                stdin=PIPE,
                stdout=PIPE,
                stderr=log,
                env={**inherited_environment(), "PYTHONPATH": module_path()},
                start_new_session=True,
            )
    except OSError as error:
        raise RunStopped(f"a rollout worker cannot be started: {error}") from error
    try:
        yield ProcessWire(process, log_path)
    finally:
        with anyio.CancelScope(shield=True):
            await _end(process)


def module_path() -> str:
    """Return where this process finds modules, for one that starts in another directory."""
    return os.pathsep.join(os.path.abspath(entry) for entry in sys.path)


async def _end(process: Process) -> None:
    assert process.stdin is not None
    with anyio.move_on_after(LEAVE_S):
        with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
            await process.stdin.aclose()
        await process.wait()
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)  # with the programs that it started
    with anyio.move_on_after(KILL_S):
        await process.aclose()


def _tail(path: Path) -> str:
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            return visible(file.read().decode(errors="replace").strip()) or "(nothing was written)"
    except OSError as error:
        return f"(cannot be read: {error.strerror})"
