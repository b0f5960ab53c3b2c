"""The processes of one trainer, as the driver sees them: start, logs, the first that dies, and the end.

Invariant: where one process ends, all end within `KILL_S` seconds, and what is reported is the one that ended first: the
others fail because it is gone. No process outlives the `running` block.
"""

from __future__ import annotations

import fcntl
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import BinaryIO, Self

import anyio
import anyio.to_thread
from anyio.abc import Process

from agentrl.concurrency import task_group
from agentrl.errors import ConfigError, TrainError

QUIT_S = 2.0
"""Seconds that idle processes get to end by themselves after their input is closed."""
KILL_S = 2.0
"""Seconds that a killed process gets to end."""
_TAIL_BYTES = 4000
"""End of the log that a message carries."""


def open_log(path: Path) -> BinaryIO:
    """Return the worker's log, open for appending.

    Raises:
        ConfigError: when the file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        log = path.open("ab")
        with suppress(OSError):  # a file system without locks
            fcntl.flock(log, fcntl.LOCK_SH)  # goes to the worker with the file, and ends with it
        return log
    except OSError as error:
        raise ConfigError(f"cannot write the trainer worker's log {path}: {error.strerror}") from error


async def worker_ended(log_path: Path) -> None:
    """Return when no process holds a log of this trainer: one whose driver was killed ends after the request in progress.

    Cancellation: nothing is left behind but a thread that waits.
    """

    def wait() -> None:
        for path in [log_path, *log_path.parent.glob(f"{log_path.stem}-*{log_path.suffix}")]:
            with suppress(OSError), path.open("rb") as log:
                fcntl.flock(log, fcntl.LOCK_EX)

    await anyio.to_thread.run_sync(wait, abandon_on_cancel=True)


def log_tail(path: Path) -> str:
    """Return the end of the worker's log, or why it cannot be read."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            return file.read().decode(errors="replace").strip() or "(nothing was written)"
    except OSError as error:
        return f"(cannot be read: {error.strerror})"


def rank_log(log_path: Path, rank: int) -> Path:
    """Return the log of one rank: `trainer.log` for rank 0, `trainer-1.log` for rank 1."""
    return log_path if rank == 0 else log_path.with_stem(f"{log_path.stem}-{rank}")


class WorkerProcesses:
    """The processes of one trainer; the first speaks to the driver."""

    def __init__(self, processes: list[Process], log_path: Path) -> None:
        self._processes, self._log_path = processes, log_path
        self._died = anyio.Event()
        self._first_death: str | None = None
        self._ending = False

    @property
    def first(self) -> Process:
        """Rank 0."""
        return self._processes[0]

    @property
    def others(self) -> list[Process]:
        """The other ranks, in order."""
        return self._processes[1:]

    @classmethod
    @asynccontextmanager
    async def running(
        cls, commands: Sequence[Sequence[str]], log_path: Path, environment: Mapping[str, str]
    ) -> AsyncGenerator[Self]:
        """Yield one process for each of `commands`, rank 0 first; when one ends, all are killed.

        Raises:
            ConfigError: a log cannot be written.
            TrainError: a process cannot be started.

        Cancellation: they are killed.
        """
        started: list[Process] = []
        try:
            for rank, command in enumerate(commands):
                with open_log(rank_log(log_path, rank)) as output:
                    try:
                        started.append(await anyio.open_process(command, stderr=output, env=dict(environment)))
                    except OSError as error:
                        raise TrainError(f"rank {rank} of the trainer cannot be started: {error}") from error
            processes = cls(started, log_path)
            async with task_group() as watching:
                for rank in range(len(started)):
                    watching.start_soon(processes._watch, rank)
                try:
                    yield processes
                finally:
                    processes._ending = True
                    watching.cancel_scope.cancel()
        finally:
            with anyio.CancelScope(shield=True):
                await _killed(started)

    async def _watch(self, rank: int) -> None:
        code = await self._processes[rank].wait()
        if self._first_death is None and not self._ending:
            name = f"rank {rank}: " if len(self._processes) > 1 else ""
            log = rank_log(self._log_path, rank)
            self._first_death = f"{name}exit code {code}; the end of {log}:\n{log_tail(log)}"
            self._died.set()
            self.kill()

    async def obituary(self) -> str:
        """Return how the first process ended, and the end of its log.

        Cancellation: nothing is left behind.
        """
        with anyio.move_on_after(KILL_S):
            await self._died.wait()
        return (
            self._first_death
            or f"still running but its output is closed; the end of {self._log_path}:\n{log_tail(self._log_path)}"
        )

    def kill(self) -> None:
        """Kill all processes."""
        _kill(self._processes)

    async def end(self) -> None:
        """Close the input of rank 0, which ends the others, and return when all have ended, or after `QUIT_S`.

        After `QUIT_S` the input of the others is closed too: it ends one that waits in a collective at once.

        Cancellation: they may still run; leaving `running` kills them.
        """
        self._ending = True
        await _close_input(self.first)
        with anyio.move_on_after(QUIT_S):
            for process in self._processes:
                await process.wait()
        for process in self.others:
            await _close_input(process)


async def _close_input(process: Process) -> None:
    assert process.stdin is not None
    await process.stdin.aclose()


def _kill(processes: Sequence[Process]) -> None:
    for process in processes:
        with suppress(ProcessLookupError):  # it may end by itself between the check and the signal
            if process.returncode is None:
                process.kill()


async def _killed(processes: Sequence[Process]) -> None:
    _kill(processes)
    with anyio.move_on_after(KILL_S):
        for process in processes:
            await process.aclose()
