"""One started sandbox, whatever isolates it, and a program's run in it.

Invariant: when `run_in_box` returns or raises, every process of the box has been killed. After the program's start nothing
that it does is a fault: a program that the kernel takes long to end has its result, and its starter waits for its end.
"""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager, suppress
from typing import Final, NamedTuple, Protocol

import anyio

from agentrl.concurrency import task_group
from agentrl.errors import EnvironmentFault
from agentrl.sandbox.pipes import PipeReader, PipeWriter
from agentrl.sandbox.types import Ending, Limits, Program, Result

WATCH_S: Final = 0.02
"""Seconds between two samples of memory and files."""
READY: Final = b"ready\n"
"""What process 1 of a box writes to its standard error before it starts the program; no part of the program's output."""
START_S: Final = 60.0
"""Seconds that a box has to come to that."""
KILL_S: Final = 10.0
"""Seconds for which a result waits for the kernel to end the processes of a sandbox."""
PAUSE_S: Final = 0.5
"""Seconds at most between a look that took long and the next one."""
LOOK_S: Final = 10.0
"""Seconds after which a program whose memory cannot be read counts as one over its limit."""


class Used(NamedTuple):
    """What a box holds at one moment."""

    memory: int
    """Bytes, of all processes and directories together."""
    files: int
    """Files and directories."""


class Box(Protocol):
    """The processes of one started sandbox. The block of `Starter.start` ends them."""

    @property
    def stdin(self) -> PipeWriter: ...
    @property
    def stdout(self) -> PipeReader: ...
    @property
    def stderr(self) -> PipeReader: ...

    async def wait(self) -> int | Ending | None:
        """Wait for the program's end, and return its exit status, 128 + N after signal N, or the limit that it reached.

        None: it never started.
        """
        ...

    async def kill(self) -> None:
        """End every process, and return when none is left, or `KILL_S` later. Shielded; a second call does nothing."""
        ...

    async def look(self) -> Used | None:
        """Return what the box holds; None where the backend itself limits it, and before the start.

        Cancellation: the reading thread ends when the kernel answers it.
        """
        ...


class Starter(Protocol):
    """What starts boxes: the part of a backend that knows how to isolate."""

    def start(self, program: Program, limits: Limits, *, resident: bool = False) -> AbstractAsyncContextManager[Box]:
        """Start `program` and yield its box; the block's end kills it.

        Args:
            program: the command, with its files; its `stdin` is for the caller to send.
            limits: of the box.
            resident: the program is the supervisor of a session, which limits its processes itself.

        Raises:
            EnvironmentFault: the sandbox cannot be started.
        """
        ...


async def wait_until_ready(stderr: PipeReader) -> None:
    """Wait for the line by which the inside of a box says that the program starts now.

    Raises:
        EnvironmentFault: the box ends before, with what was said instead; or it takes too long.
    """
    said = b""
    with anyio.move_on_after(START_S) as patience:
        while line := await stderr.receive_line():
            if line == READY:
                return
            said = (said + line)[-4096:]
    if patience.cancelled_caught:
        raise EnvironmentFault(f"sandbox: it was not ready to start a program after {START_S:g} s")
    reason = said.decode(errors="replace").strip()
    raise EnvironmentFault(f"sandbox: cannot start: {reason or 'it ended without a word'}")


class ForkStarter(Protocol):
    """What starts the boxes of a warm start."""

    def start(self, program: Program, limits: Limits, *, forks: bool) -> AbstractAsyncContextManager[Box]:
        """Start `program`, which has the rights to put up walls within its box, and yield the box.

        Raises:
            EnvironmentFault: the sandbox cannot be started.
        """
        ...


class Verdict:
    """Why a box is ended before its program's own end: the first reason that was found."""

    def __init__(self) -> None:
        self.ending: Ending | None = None
        self.peak_bytes: int | None = None
        self.scope = anyio.CancelScope()
        """Cancelled by the first verdict."""

    def end(self, ending: Ending) -> None:
        """Give the verdict, unless there is one."""
        if self.ending is None:
            self.ending = ending
            self.scope.cancel()

    async def look(self, box: Box, limits: Limits) -> None:
        """Compare the box's memory and files with its limits."""
        with anyio.move_on_after(LOOK_S) as patience:
            used = await box.look()
            if used is not None:
                self.peak_bytes = max(used.memory, self.peak_bytes or 0)
                if used.memory > limits.memory_mb * 2**20:
                    self.end(Ending.MEMORY)
                if used.files > limits.num_files:
                    self.end(Ending.FILES)
        if patience.cancelled_caught:
            self.end(Ending.MEMORY)


async def run_in_box(starter: Starter, program: Program, limits: Limits) -> Result:
    """Run `program` to its end, or to its first limit.

    Raises:
        EnvironmentFault: the program could not be started.

    Cancellation: every process of the sandbox has been killed first.
    """
    verdict, code = Verdict(), None
    started_s = anyio.current_time()
    async with starter.start(program, limits) as box:
        outputs = (bytearray(), bytearray())
        async with task_group() as tasks:
            tasks.start_soon(_feed, box, program.stdin)
            for reader, kept in zip((box.stdout, box.stderr), outputs, strict=True):
                tasks.start_soon(_keep, reader, kept, limits.output_kb * 1024, verdict)
            async with task_group() as watching:
                watching.start_soon(_watch, box, limits, verdict)
                with verdict.scope, anyio.move_on_after(limits.wall_s) as patience:
                    code = await box.wait()
                if patience.cancelled_caught:
                    verdict.end(Ending.TIMEOUT)
                elif isinstance(code, Ending):
                    verdict.end(code)
                watching.cancel_scope.cancel()
            await box.kill()
            # What the program left behind may hold the pipes open.
            tasks.cancel_scope.deadline = anyio.current_time() + KILL_S
        wall_s = anyio.current_time() - started_s
        if verdict.ending is None and code is None:
            said = outputs[1].decode(errors="replace").strip()
            raise EnvironmentFault(f"sandbox: {program.argv[0]!r} was not started: {said or 'no word of the reason'}")
        stdout, stderr = (bytes(kept) for kept in outputs)
        return _result(verdict, code, stdout, stderr, wall_s)


def _result(verdict: Verdict, code: int | Ending | None, stdout: bytes, stderr: bytes, wall_s: float) -> Result:
    ended, status, number = verdict.ending, None, None
    if ended is None:
        assert isinstance(code, int)
        if code <= 128:
            ended, status = Ending.EXITED, code
        else:
            ended, number = Ending.KILLED, code - 128
    return Result(
        ended=ended,
        exit_status=status,
        signal=number,
        stdout=stdout,
        stderr=stderr,
        wall_s=wall_s,
        peak_memory_bytes=verdict.peak_bytes,
    )


async def _feed(box: Box, data: bytes) -> None:
    with suppress(BrokenPipeError):
        await box.stdin.send(data)
    box.stdin.close()


async def _keep(reader: PipeReader, kept: bytearray, limit: int, verdict: Verdict) -> None:
    while data := await reader.receive():
        room = limit - len(kept)
        kept += data[:room]
        if len(data) > room:
            verdict.end(Ending.OUTPUT)


async def _watch(box: Box, limits: Limits, verdict: Verdict) -> None:
    while True:
        began_s = anyio.current_time()
        await verdict.look(box, limits)
        await anyio.sleep(min(max(WATCH_S, anyio.current_time() - began_s), PAUSE_S))
