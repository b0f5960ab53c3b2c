"""Worker processes that run one function, beside the event loop.

Invariant: a job ends with the function's value, with the limit that its own work has spent, or with an error. A worker that
hangs or dies is ended and replaced.
"""

from __future__ import annotations

import importlib.util
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import IO, Literal, cast

import anyio
import anyio.to_thread

from agentrl.errors import ConfigError, EnvironmentFault, InvariantError
from agentrl.processes.base import module_path
from agentrl.processes.frames import FrameBuffer, framed
from agentrl.types import JsonValue

_MAX_REPLY_BYTES = 2**20
_LAST_CHARS = 2_000
_CPU_SPENT = -signal.SIGPROF


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """The settings of a worker process."""

    loader: str
    """`module:name` of a function without arguments that returns the function of the jobs."""
    name: str
    cpu_s: float | None = None
    """CPU seconds of one job; None: no limit."""
    memory_mb: int | None = None
    """Address space in MiB; None: no limit, neither for memory nor for files."""
    start_s: float = 120.0
    """Seconds that a worker has to import the function."""
    inherits_environment: bool = False
    """Whether the process sees the environment variables of its parent, secrets included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerReply:
    """The result of a job: `value`, or the limit that it spent."""

    value: JsonValue = None
    limit: Literal["cpu", "memory"] | None = None


class WorkerLost(Exception):
    """A worker hung or died, and the job is not known to be the cause."""


class WorkerProcess:
    """One process, seen from its parent."""

    def __init__(self, settings: WorkerSettings) -> None:
        self._name = settings.name
        self._ready = False
        self._stderr: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process
        command = [sys.executable, "-P", "-m", "agentrl.processes.job_worker", settings.loader, str(settings.cpu_s or 0)]
        self._process = subprocess.Popen(
            [*command, str((settings.memory_mb or 0) * 2**20)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            env=_worker_variables(settings.inherits_environment),
            close_fds=True,
            start_new_session=True,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        # A worker that does not read would block the write past the deadline of the job.
        os.set_blocking(self._stdin.fileno(), False)

    def wait_until_ready(self, seconds: float) -> None:
        """Return when the function is imported; EnvironmentFault: the process ended; WorkerLost: not within `seconds`."""
        if not self._ready:
            if self._talk(b"", seconds) is None:
                status = self._process.wait()
                raise EnvironmentFault(
                    f"{self._name}: a worker ended with status {status} while it started: {self._last_words()}"
                )
            self._ready = True

    def exchange(self, job: bytes, seconds: float) -> WorkerReply:
        """Run one job; EnvironmentFault: the function raised; WorkerLost: no answer within `seconds`."""
        body = self._talk(framed(job), seconds)
        if body is None:
            status = self._process.wait()
            if status == _CPU_SPENT:
                return WorkerReply(limit="cpu")
            raise WorkerLost(f"a worker died with status {status}: {self._last_words()}")
        reply = cast("dict[str, JsonValue]", json.loads(body))
        if "error" in reply:
            raise EnvironmentFault(f"{self._name}: the function raised:\n{reply['error']}")
        if "limit" in reply:
            return WorkerReply(limit="memory")
        return WorkerReply(value=reply["value"])

    def kill(self) -> None:
        with suppress(ProcessLookupError, PermissionError):  # it has ended
            os.killpg(self._process.pid, signal.SIGKILL)

    def end(self) -> None:
        self.kill()
        self._process.wait()
        for stream in (self._stdin, self._stdout, self._stderr):
            with suppress(OSError):
                stream.close()

    def _talk(self, frame: bytes, seconds: float) -> bytes | None:
        """Write a frame and return the body that answers it; None: the process has closed its end."""
        deadline = time.monotonic() + seconds
        left, buffer, bodies = memoryview(frame), FrameBuffer(_MAX_REPLY_BYTES), list[bytes]()
        source, sink = self._stdout.fileno(), self._stdin.fileno()
        with selectors.DefaultSelector() as selector:
            selector.register(source, selectors.EVENT_READ)
            if left:
                selector.register(sink, selectors.EVENT_WRITE)
            while not bodies:
                patience = deadline - time.monotonic()
                ready = {key.fd for key, _ in selector.select(max(0.0, patience))}
                if not ready and patience <= 0:
                    raise WorkerLost(f"a worker has not answered within {seconds:g} s: {self._last_words()}")
                if sink in ready:
                    try:
                        left = left[os.write(sink, left) :]
                    # It has ended; what it wrote before, or its status, says why.
                    except BrokenPipeError:
                        left = left[:0]
                    if not left:
                        selector.unregister(sink)
                if source in ready:
                    data = os.read(source, 65_536)
                    if not data:
                        return None
                    try:
                        bodies = buffer.cut(data)
                    except InvariantError as error:
                        most = f"more than {_MAX_REPLY_BYTES} bytes; return less"
                        raise WorkerLost(f"a worker has answered with {most}") from error
        return bodies[0]

    def _last_words(self) -> str:
        size = self._stderr.seek(0, os.SEEK_END)
        self._stderr.seek(max(0, size - _LAST_CHARS))
        return self._stderr.read().decode(errors="replace").strip() or "(it wrote nothing)"


def _worker_variables(inherits: bool) -> Mapping[str, str]:
    """Return the environment of a worker: its module path, and unless it inherits none of the parent's secrets.

    The order of sympy's sets depends on hashes; a fixed seed makes every grader grade alike.
    """
    path = module_path()
    if inherits:
        return {**os.environ, "PYTHONPATH": path}
    return {"PATH": os.defpath, "PYTHONPATH": path, "PYTHONHASHSEED": "0", "PYTHONUTF8": "1", "OMP_NUM_THREADS": "1"}


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
            # A worker that reached a limit has ended, or holds what an interrupted function left.
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
            # The thread may have waited for its turn after the caller had gone.
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
