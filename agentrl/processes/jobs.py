"""Worker processes that run one function, beside the event loop.

Invariant: a job ends with the function's value, with the limit that its own work has spent, or with an error. A worker that
hangs or dies is ended and replaced.
"""

from __future__ import annotations

import importlib.util
import json
import threading
import weakref
from contextlib import suppress

import anyio
import anyio.to_thread

from agentrl.errors import ConfigError
from agentrl.processes.job_process import WorkerLost, WorkerProcess, WorkerReply, WorkerSettings
from agentrl.types import JsonValue


class WorkerPool:
    """Processes that run one function, at most `num_workers`; they start when they are needed, and further jobs wait.

    Raises:
        ConfigError: there is no such module, or less than one worker.
    """

    def __init__(self, settings: WorkerSettings, *, num_workers: int) -> None:
        module, colon, name = settings.loader.partition(":")
        if not (module and colon and name) or _is_missing(module):
            raise ConfigError(
                f"{settings.name}: expected module:name of a function in a module that can be imported, "
                f"got {settings.loader!r}"
            )
        if num_workers < 1:
            raise ConfigError(f"{settings.name}: num_workers must be at least 1, got {num_workers}")
        self._settings = settings
        self._limiter = anyio.CapacityLimiter(num_workers)
        self._idle: list[WorkerProcess] = []
        self._end_idle = weakref.finalize(self, _end_all, self._idle)

    def close(self) -> None:
        """End the workers. Without this they end when the pool is garbage or the program ends."""
        _end_all(self._idle)

    async def run(self, *arguments: JsonValue, wall_s: float, in_new_worker: bool = False) -> WorkerReply:
        """Run one job, JSON in and out; `wall_s` counts neither the wait for a free worker nor its start.

        Raises:
            EnvironmentFault: the function raised, or a worker could not start.
            WorkerLost: the worker hung or died.
        """
        job = json.dumps(arguments).encode()
        run = _Run(self._settings, [] if in_new_worker else self._idle, self._idle, job, wall_s)
        try:
            return await anyio.to_thread.run_sync(run, limiter=self._limiter, abandon_on_cancel=True)
        except anyio.get_cancelled_exc_class():
            run.abort()
            raise


class _Run:
    """One attempt at one job, in a thread; `abort` may be called from another one."""

    def __init__(
        self, settings: WorkerSettings, idle: list[WorkerProcess], kept: list[WorkerProcess], job: bytes, wall_s: float
    ) -> None:
        self._settings, self._idle, self._kept, self._job, self._wall_s = settings, idle, kept, job, wall_s
        self._lock = threading.Lock()
        self._worker: WorkerProcess | None = None
        self._aborted = False

    def __call__(self) -> WorkerReply:
        worker = self._take()
        usable = False
        try:
            worker.wait_until_ready(self._settings.start_s)
            reply = worker.exchange(self._job, self._wall_s)
            usable = reply.limit is None
        finally:
            with self._lock:
                self._worker = None
            if usable and not self._aborted:
                self._kept.append(worker)
            else:
                worker.end()
        return reply

    def abort(self) -> None:
        with self._lock:
            self._aborted = True
            if self._worker is not None:
                self._worker.kill()

    def _take(self) -> WorkerProcess:
        with self._lock:
            if self._aborted:
                raise WorkerLost("its job was cancelled")
            with suppress(IndexError):
                self._worker = self._idle.pop()
                return self._worker
            self._worker = WorkerProcess(self._settings)
            return self._worker


def _is_missing(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is None
    except (ImportError, ValueError):
        return True


def _end_all(workers: list[WorkerProcess]) -> None:
    while workers:
        workers.pop().end()
