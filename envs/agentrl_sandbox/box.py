"""One started sandbox, whatever isolates it: the run of one program in it, or the way to the supervisor of a session.

Invariant: when `run_in_box` or the block of `open_session` ends, every process of the box has been killed. After the
program's start nothing that it does is a fault: a program that the kernel takes long to end has its result, and its starter
waits for its end. A single program runs without a supervisor: its start is 2.5 times as fast, and nothing that reports on
it lives beside it.
"""

from __future__ import annotations

import json
import struct
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext, suppress
from typing import Any, Final, Literal, NamedTuple, Protocol, TypeAlias

import anyio

from agentrl.errors import EnvironmentFault
from agentrl.support.concurrency import task_group
from agentrl_sandbox.kernel_limits import process_limits
from agentrl_sandbox.passage import Port, open_passage
from agentrl_sandbox.pipes import PipeReader, PipeWriter
from agentrl_sandbox.session import Session, session_over
from agentrl_sandbox.types import MIB, Ending, Limits, Program, Result

Use: TypeAlias = Literal["program", "session", "forks"]
"""The use of a box: one program, the supervisor of a session, or a warm Python that puts each fork behind walls. The last
two limit the processes that they start themselves."""
WATCH_S: Final = 0.02
"""Seconds between two samples of memory and files while a program runs."""
IDLE_WATCH_S: Final = 0.2
"""Seconds between two samples of a session between its calls, when only background jobs can grow."""
READY: Final = b"ready\n"
"""Process 1 of a box writes it to its standard error before it starts the program; no part of the program's output."""
BOX_START_S: Final = 60.0
"""Seconds that a box has to write it."""
SUPERVISOR_S: Final = 30.0
"""Seconds that the supervisor of a session has to answer."""
KILL_S: Final = 10.0
"""Seconds for which a result waits for the kernel to end the processes of a sandbox."""
PAUSE_S: Final = 0.5
"""Seconds at most between a look that took long and the next one."""
UNREADABLE_S: Final = 10.0
"""Seconds after which a program whose memory cannot be read counts as one over its limit."""
_WARM_PROCESSES: Final = 3
"""Processes of a warm start, beyond the one that a sandbox of a program's own has; they count as the program's user."""


class Used(NamedTuple):
    """The contents of a box at one moment."""

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
        """Wait for the program's end; return its exit status, 128 + N after signal N, its limit, or None: not started."""
        ...

    async def kill(self) -> None:
        """End every process, and return when none is left, or `KILL_S` later. Shielded; a second call does nothing."""
        ...

    async def look(self) -> Used | None:
        """Return what the box holds; None where the backend itself limits it, and before the start."""
        ...


class Starter(Protocol):
    """The part of a backend that isolates: it starts boxes."""

    def start(self, program: Program, limits: Limits, *, use: Use = "program") -> AbstractAsyncContextManager[Box]:
        """Start `program` with its files and yield its box, which the block's end kills; or raise an EnvironmentFault."""
        ...


async def wait_until_ready(stderr: PipeReader) -> None:
    """Wait for `READY`; a box that ends before, or takes too long, is an EnvironmentFault with its last words."""
    said = b""
    with anyio.move_on_after(BOX_START_S) as patience:
        while line := await stderr.receive_line():
            if line == READY:
                return
            # Only the end is kept: the program's side of the pipe is not trusted with this process's memory.
            said = (said + line)[-4096:]
    if patience.cancelled_caught:
        raise EnvironmentFault(f"sandbox: it was not ready to start a program after {BOX_START_S:g} s")
    reason = said.decode(errors="replace").strip()
    raise EnvironmentFault(f"sandbox: cannot start: {reason or 'it ended without a word'}")


class Verdict:
    """The reason to end a box before its program's own end: the first that was found."""

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
        with anyio.move_on_after(UNREADABLE_S) as patience:
            used = await box.look()
            if used is not None:
                self.peak_bytes = max(used.memory, self.peak_bytes or 0)
                if used.memory > limits.memory_mb * 2**20:
                    self.end(Ending.MEMORY)
                if used.files > limits.num_files:
                    self.end(Ending.FILES)
        if patience.cancelled_caught:
            self.end(Ending.MEMORY)

    async def watch(self, box: Box, limits: Limits, pause: Callable[[float], Awaitable[None]]) -> None:
        """Look again and again, with a `pause` of about so many seconds in between, until there is a verdict."""
        while True:
            began_s = anyio.current_time()
            await self.look(box, limits)
            if self.ending is not None:
                return
            await pause(min(max(WATCH_S, anyio.current_time() - began_s), PAUSE_S))


async def run_in_box(starter: Starter, program: Program, limits: Limits) -> Result:
    """Run `program` to its end, or to its first limit; a program that was not started is an EnvironmentFault."""
    verdict, code = Verdict(), None
    started_s = anyio.current_time()
    async with starter.start(program, limits) as box:
        outputs = (bytearray(), bytearray())
        async with task_group() as tasks:
            tasks.start_soon(_feed, box, program.stdin)
            for reader, kept in zip((box.stdout, box.stderr), outputs, strict=True):
                tasks.start_soon(_keep, reader, kept, limits.output_kb * 1024, verdict)
            async with task_group() as watching:
                watching.start_soon(verdict.watch, box, limits, anyio.sleep)
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


class BoxSupervisor:
    """The way to a supervisor on this machine."""

    def __init__(self, box: Box, limits: Limits) -> None:
        self._box, self._limits = box, limits
        self._verdict = Verdict()
        self._is_open = True
        self._in_call = anyio.Event()
        """Set while a call runs; ends the longer wait of `watch`."""
        self._stderr = b""

    @property
    def ending(self) -> Ending:
        """The reason for the end of the sandbox."""
        return self._verdict.ending or Ending.KILLED

    async def begin(self) -> None:
        """Wait for the supervisor; one that does not start is an EnvironmentFault."""
        with anyio.move_on_after(SUPERVISOR_S):
            first = await self._receive()
            if first is not None:
                await self._box.look()  # opens what the supervisor hides from then on
                return
            await self._box.wait()
        said = (self._stderr + self._box.stderr.receive_nowait()).decode(errors="replace").strip()
        raise EnvironmentFault(f"sandbox: the supervisor of a session does not start: {said or 'it said nothing'}")

    async def ask(self, request: bytes, timeout_s: float) -> bytes | None:
        """Send a request and return its reply; None: the sandbox has ended. A cancelled request ends the sandbox."""
        if not self._is_open:
            return None
        reply = None
        self._in_call.set()
        try:
            with anyio.move_on_after(timeout_s) as patience:
                try:
                    await self._box.stdin.send(struct.pack(">I", len(request)) + request)
                    reply = await self._receive()
                except BrokenPipeError:
                    reply = None
            if patience.cancelled_caught:
                self._verdict.end(Ending.TIMEOUT)
        finally:
            self._in_call = anyio.Event()
            if reply is None:
                self._is_open = False
                await self._box.kill()
        if reply is None:
            await self._note_end()
        return reply

    async def _note_end(self) -> None:
        """Take note of a limit by which the kernel has ended the box; only the box itself knows of it."""
        with anyio.move_on_after(KILL_S):
            ended = await self._box.wait()
            if isinstance(ended, Ending):
                self._verdict.end(ended)

    async def watch(self) -> None:
        """End the sandbox when its programs use too much."""
        await self._verdict.watch(self._box, self._limits, self._pause)
        await self._box.kill()

    async def _pause(self, seconds: float) -> None:
        with anyio.move_on_after(IDLE_WATCH_S):
            await self._in_call.wait()
            await anyio.sleep(seconds)

    async def drain(self) -> None:
        """Read what the supervisor itself says, and keep the end of it."""
        while data := await self._box.stderr.receive():
            self._stderr = (self._stderr + data)[-4096:]

    async def _receive(self) -> bytes | None:
        head = await self._box.stdout.receive_exactly(4)
        if len(head) < 4:
            return None
        [length] = struct.unpack(">I", head)
        if length > self._most():
            return None
        data = await self._box.stdout.receive_exactly(length)
        return data if len(data) == length else None

    def _most(self) -> int:
        """Return the length of the longest honest reply, a snapshot or two outputs as base64."""
        return 2 * (self._limits.work_mb * MIB + self._limits.output_kb * 2048 + self._limits.num_files * 8192)


@asynccontextmanager
async def open_session(
    starter: Starter,
    command: tuple[str, ...],
    limits: Limits,
    files: Mapping[str, bytes] | None = None,
    port: Port | None = None,
) -> AsyncGenerator[Session]:
    """Start a supervisor in a box and yield the session; `command` is Python and the supervisor, as the box sees them.

    The box reaches `port` of this machine's loopback.
    """
    async with (
        _supervised(starter, command, supervisor_options(limits), limits, "session", port) as supervisor,
        session_over(supervisor, limits, files) as session,
    ):
        yield session


@asynccontextmanager
async def open_forks(starter: Starter, command: tuple[str, ...], limits: Limits) -> AsyncGenerator[Session]:
    """Start a warm Python in a box, as `open_session` does, and yield a session that has nothing but `run_python`."""
    options = supervisor_options(limits)
    kept = {**options["limits"], "NPROC": limits.processes + _WARM_PROCESSES, "CPU": limits.cpu_s}
    sizes = {"/work": limits.work_mb, "/tmp": limits.temp_mb, "/dev/shm": limits.shared_mb}
    options |= {"limits": kept, "sizes": {path: size * MIB for path, size in sizes.items()}, "num_files": limits.num_files}
    async with _supervised(starter, command, options, limits, "forks") as supervisor:
        yield Session(supervisor, limits)


def supervisor_options(limits: Limits) -> dict[str, Any]:
    """Return the limits of a session in the form that its supervisor reads."""
    return {"limits": process_limits(limits), "output": limits.output_kb * 1024, "cpu_s": limits.cpu_s}


@asynccontextmanager
async def _supervised(
    starter: Starter,
    command: tuple[str, ...],
    options: Mapping[str, Any],
    limits: Limits,
    use: Use,
    port: Port | None = None,
) -> AsyncGenerator[BoxSupervisor]:
    """Yield the way to the supervisor that `command` starts in a box, and watch what its programs use."""
    with nullcontext() if port is None else open_passage(port) as passage:
        if passage is not None:
            command = passage.before(command)
        inherited = () if passage is None else (passage.descriptor,)
        program = Program(argv=(*command, json.dumps(options)), inherited=inherited)
        async with starter.start(program, limits, use=use) as box:
            supervisor = BoxSupervisor(box, limits)
            await supervisor.begin()
            async with task_group() as tasks:
                tasks.start_soon(supervisor.watch)
                if passage is not None:
                    tasks.start_soon(passage.carry)
                tasks.start_soon(supervisor.drain)
                yield supervisor
                tasks.cancel_scope.cancel()
