"""One worker process, seen from its parent.

Invariant: an exchange ends with the function's value, with the limit that the job has spent, or with an error; a process
that hung or died is never used again.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import IO, Literal, cast

from agentrl.errors import EnvironmentFault, InvariantError
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
