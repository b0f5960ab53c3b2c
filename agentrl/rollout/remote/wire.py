"""Worker processes on this machine, and what the driver needs of any worker: a stream of bytes in each direction.

Invariant: no process outlives the block that started it, nor do the programs that it started.
"""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from pathlib import Path
from typing import Protocol, TypeAlias

import anyio
from anyio.abc import ByteStream

from agentrl.processes.base import ProcessSpec
from agentrl.processes.local import LocalChild, LocalLauncher

STREAM_ENDS = (anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError)
"""What a stream raises whose other side has ended."""
LEAVE_S = 4.0
"""Seconds that a worker gets to end by itself after its input is closed."""
_END_S = 10.0
"""Seconds that a worker has to end after its output."""
_READ_BYTES = 1 << 18


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

    def __init__(self, child: LocalChild) -> None:
        """Speak to `child`, whose log is a file of this machine."""
        self._child = child

    async def send(self, data: bytes) -> None:
        """Write all of `data`; see `Wire`."""
        await self._child.stdin.send(data)

    async def receive(self) -> bytes:
        """Return the next bytes; see `Wire`."""
        return await self._child.stdout.receive(_READ_BYTES)

    async def obituary(self) -> str:
        """Return how the process ended; see `Wire`."""
        child = self._child
        how = "its output is closed, but it still runs"
        with anyio.move_on_after(_END_S):
            how = (await child.ended()).reason
        return f"{child.where}, {how}; the end of {child.spec.log_path}:\n{await child.log_tail()}"


class StreamWire:
    """A connection with a worker on any node."""

    shares_clock = False

    def __init__(self, stream: ByteStream, obituary: Callable[[], Awaitable[str]]) -> None:
        """Speak over `stream`; `obituary` waits for the end of the worker and returns how it ended."""
        self._stream, self._obituary = stream, obituary
        self.ended = anyio.Event()
        """Set once `receive` has met the end of the stream."""

    async def send(self, data: bytes) -> None:
        """Write all of `data`; see `Wire`."""
        await self._stream.send(data)

    async def receive(self) -> bytes:
        """Return the next bytes; see `Wire`."""
        try:
            return await self._stream.receive(_READ_BYTES)
        except STREAM_ENDS:
            self.ended.set()
            raise

    async def obituary(self) -> str:
        """Return how the worker ended; see `Wire`."""
        return await self._obituary()


@asynccontextmanager
async def local_worker(name: str, log_path: Path) -> AsyncGenerator[ProcessWire]:
    """Yield a worker process of this machine, which appends its output to `log_path`.

    Raises:
        ConfigError: the log cannot be written.
        LaunchError: the process cannot be started.

    Cancellation: its input is closed, so that it ends by itself; after `LEAVE_S` it is killed.
    """
    spec = ProcessSpec(
        name=name,
        role="rollout",
        command=(sys.executable, "-P", "-m", "agentrl.rollout.remote.process"),
        environment={"PYTHONPATH": module_path()},
        log_path=log_path,
    )
    [child] = await LocalLauncher().start([spec])
    try:
        yield ProcessWire(child)
    finally:
        with anyio.CancelScope(shield=True):
            with anyio.move_on_after(LEAVE_S):
                with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
                    await child.stdin.aclose()
                await child.ended()
            await child.reap()  # with the programs that it started


def module_path() -> str:
    """Return where this process finds modules, for one that starts in another directory."""
    return os.pathsep.join(os.path.abspath(entry) for entry in sys.path)
