"""The opt-out: programs as plain processes of this machine, with limits but without isolation.

Invariant: it is never chosen for anyone. It says what it is on standard error each time it is opened, and every episode
that uses it records `unsafe_sandbox`.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import anyio

from agentrl.errors import EnvironmentFault
from agentrl_sandbox import inside
from agentrl_sandbox.base import BoxSandbox
from agentrl_sandbox.box import KILL_S, Use
from agentrl_sandbox.kernel_limits import find_prlimit, limited
from agentrl_sandbox.pipes import PipedBox, PipedProcess
from agentrl_sandbox.types import Limits, Program

WARNING = (
    "warning: UNSAFE: the sandbox `unsafe_process` isolates nothing; programs that a model wrote run as this user, and can "
    "read its files and keys and use its network"
)


class ProcessBox(PipedBox):
    """A plain process and its group."""

    async def kill(self) -> None:
        """End the process and its group; what left the group lives on."""
        if self._is_dead:
            return
        with anyio.CancelScope(shield=True):
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            with anyio.move_on_after(KILL_S):
                await self._process.wait()
        self._is_dead = True


class ProcessStarter:
    """Starts plain processes."""

    def __init__(self) -> None:
        self._prlimit = find_prlimit()

    @asynccontextmanager
    async def start(self, program: Program, limits: Limits, *, use: Use = "program") -> AsyncGenerator[ProcessBox]:
        """Start `program` in a temporary directory, yield it, and kill it when the block ends."""
        with TemporaryDirectory(prefix="agentrl-unsafe-", ignore_cleanup_errors=True) as folder:
            write_tree(Path(folder), program.files)
            path = f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin"
            variables = {"PATH": path, "HOME": folder, "LANG": "C.UTF-8", "TMPDIR": folder, **program.environment}
            command = limited(self._prlimit, limits, program.argv) if use == "program" else list(program.argv)
            try:
                process = PipedProcess(command, environment=variables, directory=folder)
            except OSError as error:
                raise EnvironmentFault(f"sandbox: cannot start {command[0]}: {error}") from error
            box = ProcessBox(process)
            try:
                yield box
            finally:
                await box.kill()
                process.close()


def write_tree(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write files below a new folder."""
    for name, data in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def open_unsafe_process(*, limits: Limits | None = None) -> BoxSandbox:
    """Return a sandbox that isolates nothing, and print that it does not.

    Of `limits`, those that the kernel keeps for each process apply, and `wall_s` and `output_kb`; no others.
    """
    sys.stderr.write(WARNING + "\n")
    supervisor = str(Path(inside.__file__).with_name("supervisor.py"))
    command = (sys.executable, "-I", "-S", "-B", supervisor)
    return BoxSandbox("unsafe_process", ProcessStarter(), command, is_isolated=False, limits=limits)
