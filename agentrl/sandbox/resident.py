"""The box of a session: starts the supervisor, carries requests to it, and watches what its programs use.

Invariant: when the block of `open_session` ends, no process of the box is alive.
"""

from __future__ import annotations

import json
import struct
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from typing import Any, Final

import anyio

from agentrl.concurrency import task_group
from agentrl.errors import EnvironmentFault
from agentrl.sandbox.box import KILL_S, WATCH_S, Box, ForkStarter, Starter, Verdict
from agentrl.sandbox.kernel_limits import process_limits
from agentrl.sandbox.session import Session, session_over
from agentrl.sandbox.types import MIB, Ending, Limits, Program

START_S: Final = 30.0
_WARM_PROCESSES: Final = 3
"""Processes of a warm start, beyond the one that a sandbox of a program's own has; they count as the program's user."""
IDLE_WATCH_S: Final = 0.2
"""Seconds between two looks at a session between its calls, when only background jobs can grow."""


class BoxLink:
    """The way to a supervisor on this machine."""

    def __init__(self, box: Box, limits: Limits) -> None:
        """Talk to the supervisor in `box`."""
        self._box, self._limits = box, limits
        self._verdict = Verdict()
        self._is_open = True
        self._in_call = anyio.Event()
        """Set while a call runs; ends the longer wait of `watch`."""
        self._stderr = b""

    @property
    def ending(self) -> Ending:
        """Why the sandbox has ended."""
        return self._verdict.ending or Ending.KILLED

    async def begin(self) -> None:
        """Wait for the supervisor.

        Raises:
            EnvironmentFault: it does not start.
        """
        with anyio.move_on_after(START_S):
            first = await self._receive()
            if first is not None:
                await self._box.look()  # opens what the supervisor hides from then on
                return
            await self._box.wait()
        said = (self._stderr + self._box.stderr.receive_nowait()).decode(errors="replace").strip()
        raise EnvironmentFault(f"sandbox: the supervisor of a session does not start: {said or 'it said nothing'}")

    async def ask(self, request: bytes, timeout_s: float) -> bytes | None:
        """Send a request and return its reply; None: the sandbox has ended.

        Cancellation: the sandbox is ended.
        """
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
        while True:
            await self._verdict.look(self._box, self._limits)
            if self._verdict.ending is not None:
                await self._box.kill()
                return
            with anyio.move_on_after(IDLE_WATCH_S):
                await self._in_call.wait()
                await anyio.sleep(WATCH_S)

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
    starter: Starter, command: tuple[str, ...], limits: Limits, files: Mapping[str, bytes] | None
) -> AsyncGenerator[Session]:
    """Start a supervisor in a box and yield the session; the block's end kills the box.

    Args:
        starter: of the box.
        command: Python and the path of the supervisor, as the sandbox sees them.
        limits: of the session.
        files: first contents of the working directory.

    Raises:
        EnvironmentFault: it cannot be started.

    Cancellation: every process of the sandbox is dead first.
    """
    program = Program(argv=(*command, json.dumps(_options(limits))))
    async with (
        starter.start(program, limits, resident=True) as box,
        _linked(box, limits) as link,
        session_over(link, limits, files) as session,
    ):
        yield session


@asynccontextmanager
async def open_forks(starter: ForkStarter, command: tuple[str, ...], limits: Limits) -> AsyncGenerator[Session]:
    """Start a warm Python in a box, and yield a session that has nothing but `run_python`.

    Args:
        starter: of the box.
        command: Python and the path of the first process, as the sandbox sees them.
        limits: of the box, and of each program.

    Raises:
        EnvironmentFault: it cannot be started.

    Cancellation: every process of the sandbox is dead first.
    """
    options = _options(limits)
    kept = {**options["limits"], "NPROC": limits.processes + _WARM_PROCESSES, "CPU": limits.cpu_s}
    sizes = {"/work": limits.work_mb, "/tmp": limits.temp_mb, "/dev/shm": limits.shared_mb}
    options |= {"limits": kept, "sizes": {path: size * MIB for path, size in sizes.items()}, "num_files": limits.num_files}
    program = Program(argv=(*command, json.dumps(options)))
    async with starter.start(program, limits, forks=True) as box, _linked(box, limits) as link:
        yield Session(link, limits)


@asynccontextmanager
async def _linked(box: Box, limits: Limits) -> AsyncGenerator[BoxLink]:
    """Yield the way to the supervisor in `box`, and watch what its programs use."""
    link = BoxLink(box, limits)
    await link.begin()
    async with task_group() as tasks:
        tasks.start_soon(link.watch)
        tasks.start_soon(link.drain)
        yield link
        tasks.cancel_scope.cancel()


def _options(limits: Limits) -> dict[str, Any]:
    return {"limits": process_limits(limits), "output": limits.output_kb * 1024, "cpu_s": limits.cpu_s}
