"""The interface of launchers: the order for a process, its end, and the launcher of this machine. No torch, no ray.

Invariant: the caller that starts processes through a launcher stops each of them. A launcher adds nothing to what runs:
the same command and environment give the same process under each of them, on this machine or on another node.

A process of this machine has a session to itself, so that it ends together with those that it started, and a Ctrl-C in the
terminal reaches only the driver. The kernel closes its standard input when the driver ends, even by SIGKILL.
"""

from __future__ import annotations

import fcntl
import os
import signal
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from subprocess import PIPE, STDOUT
from typing import BinaryIO, Literal, Protocol

import anyio
from anyio.abc import ByteReceiveStream, ByteSendStream, Process

from agentrl.errors import ConfigError, LaunchError
from agentrl.processes.machine import LOOPBACK, free_port
from agentrl.support.folders import make_private
from agentrl.support.foreign import visible

HOST_WORD = "{host}"
"""Stands in a command for the address at which others reach the node."""
PORT_WORD = "{port}"
"""Stands in a command for a free port of the node."""
RESTART_WINDOW_S = 3600.0
"""Seconds in which the restarts of a process are counted together."""
RESTARTS = 3
"""Times within them that a rollout worker, or a host of containers, starts again."""
STOP_S = 3.0
"""Seconds between SIGTERM and SIGKILL."""
DRAIN_S = 1.0
"""Seconds that the output of an ended process gets to arrive."""
TAIL_BYTES = 4000
"""End of a log that a message carries."""
TAIL_LINES = 40
"""Lines of it, at most."""
TOKEN_VARIABLE = "AGENTRL_CLUSTER_TOKEN"
"""Environment variable with the secret by which a trainer rank and its driver know each other."""
MAX_LINE = 65_536
"""Bytes of a line; the beginning of a longer one is left out, so that output without an end fills no memory."""
_REAP_S = 2.0
"""Seconds that a killed process gets to end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSpec:
    """A process to start. Its standard input, the lifeline, stays open until the launcher or the driver ends."""

    name: str
    """In messages, such as `trainer rank 3`, `server 1`, `rollout worker 0`."""
    role: Literal["trainer", "server", "rollout", "host"]
    """A launcher may place roles on different nodes. A server's standard error joins its standard output."""
    command: tuple[str, ...]
    """The first word `sys.executable` means the Python of the node; `HOST_WORD` and `PORT_WORD` are filled in there."""
    environment: Mapping[str, str]
    """Added to the environment of the node."""
    log_path: Path
    """Gets what the process writes, after what is there."""
    cpus: int = 1
    """Cores to reserve, where the launcher reserves any."""
    gpus: int = 0
    """GPUs to reserve, where the launcher reserves any; the process then sees only these."""
    apart: bool = False
    """Whether no two processes of one start share a node, where the launcher chooses nodes."""

    def command_on(self, host: str, port: int, python: str = sys.executable) -> tuple[str, ...]:
        """Return the command as a node runs it.

        Example:
            >>> spec = ProcessSpec(
            ...     name="server 0", role="server", command=("serve", "--port={port}"), environment={}, log_path=Path("log")
            ... )
            >>> spec.command_on("10.0.0.2", 8000)
            ('serve', '--port=8000')
        """
        first, *words = self.command
        filled = (word.replace(HOST_WORD, host).replace(PORT_WORD, str(port)) for word in words)
        return (python if first == sys.executable else first, *filled)


@dataclass(frozen=True, slots=True, kw_only=True)
class Exit:
    """The end of a process."""

    code: int | None
    """Exit code, negative for a signal; None: its node is gone."""
    reason: str
    """For messages, such as `exit code 1`, `signal SIGKILL`, `node 10.0.0.3 is gone`."""
    log_tail: str
    """The end of its log, or why it cannot be read."""

    @property
    def was_killed(self) -> bool:
        """Whether a signal or the loss of its node ended it."""
        return self.code is None or self.code < 0


class Child(Protocol):
    """A process that a launcher started."""

    spec: ProcessSpec
    where: str
    """For messages, such as `pid 123`, `pid 123 on node 10.0.0.3`."""
    host: str
    """Address at which others reach the process."""
    port: int
    """The port that `PORT_WORD` stands for; 0 where the command has none."""

    async def ended(self) -> Exit:
        """Wait until the process has ended, and return how; at once where it has. Several tasks may wait."""
        ...

    async def log_tail(self) -> str:
        """Return the end of the log of the process, which may still run."""
        ...

    def kill(self) -> None:
        """Kill the process and those that it started; returns at once, and does nothing where it has ended."""
        ...

    async def stop(self) -> None:
        """End the process and those that it started by SIGTERM, after `STOP_S` by SIGKILL; returns within 5 seconds."""
        ...

    def lines(self) -> AsyncIterator[str]:
        """Return the lines of standard output from now on; the log gets them as they are read.

        One task at a time reads them, to the end: the process blocks when nothing reads.
        """
        ...


class Launcher(Protocol):
    """Starts processes."""

    elsewhere: bool
    """Whether processes may start on other machines than the driver's."""

    async def reserves_gpus(self) -> bool:
        """Return whether it has GPUs to reserve."""
        ...

    async def start(self, specs: Sequence[ProcessSpec]) -> Sequence[Child]:
        """Start all of `specs` or none, and return a child for each, in order; the caller stops each.

        Raises:
            ConfigError: a log cannot be written, or the cluster can never place the processes.
            LaunchError: a process cannot be started, or the nodes have no room for it within `cluster.start_timeout_s`.

        Cancellation: what was started is killed, or still returned, for the caller to stop.
        """
        ...


def module_path() -> str:
    """Return the places where this process finds modules, as PYTHONPATH of one that starts in another directory."""
    return os.pathsep.join(os.path.abspath(entry) for entry in sys.path)


def describe_code(code: int) -> str:
    """Return an exit code in words.

    Example:
        >>> describe_code(1), describe_code(-9)
        ('exit code 1', 'signal SIGKILL')
    """
    if code >= 0:
        return f"exit code {code}"
    names = {number.value: number.name for number in signal.Signals}
    return f"signal {names.get(-code, -code)}"


def read_tail(path: Path) -> str:
    """Return the end of a log that this machine can read, or why it cannot be read."""
    try:
        with path.open("rb") as log:
            log.seek(max(0, path.stat().st_size - TAIL_BYTES))
            text = log.read().decode(errors="replace")
    except OSError as error:
        return f"(cannot be read: {error.strerror})"
    return shorten_tail(text)


def shorten_tail(text: str) -> str:
    """Return the last `TAIL_LINES` lines of a log, safe to print."""
    return visible("\n".join(text.strip().splitlines()[-TAIL_LINES:])) or "(nothing was written)"


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
        # The lines that a server writes last say why it ended, and the reader may be behind.
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
                # Written as it comes: if this process is killed, the log has what the server said until then.
                log.write(data)
            *self._lines, rest = (self._rest + data).split(b"\n")
            # A program that never ends its line must not fill this process's memory.
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
                # A worker's standard output carries frames, so only its errors can go to the log.
                stderr=STDOUT if spec.role == "server" else log,
                env={**inherited_environment(), **spec.environment},
                # A group of its own: a Ctrl-C in the terminal does not reach it, and one signal ends it with its
                # children.
                start_new_session=True,
            )
        except OSError as error:
            raise LaunchError(f"cannot start {command[0]} for {spec.name}: {error}") from error
    return LocalChild(spec, process, port)


def _signal_group(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)
