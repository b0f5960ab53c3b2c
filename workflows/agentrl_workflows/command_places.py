"""Where the program of an episode runs: as a process of this machine, or in a sandbox that reaches nothing but the door.

Invariant: when a place has returned, no process of the program is alive, and what it left is on this machine: the result
file, and the files of its working directory where a grader wants them. No link is followed.
"""

from __future__ import annotations

import io
import os
import stat
import tarfile
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import anyio
import anyio.to_thread

from agentrl.client import Door
from agentrl.errors import ConfigError, WorkflowError
from agentrl.processes.marked import end_marked
from agentrl_sandbox import Ending, Program, Result, SandboxPool
from agentrl_sandbox.box import Use, run_in_box
from agentrl_sandbox.pipes import PipedProcess
from agentrl_sandbox.types import MIB, Limits
from agentrl_sandbox.unsafe import ProcessBox

MAX_RESULT_BYTES: Final = MIB
_MAX_FILES: Final = 4096
_MAX_FILES_BYTES: Final = 64 * MIB
_FILL_S: Final = 60.0
"""Seconds that a sandbox has to take the files of the task."""
PROGRAMS: Final = "/tmp/agentrl"
"""The folder in a sandbox of the files that a command names."""
_UNPACK: Final = "import sys, tarfile; tarfile.open(fileobj=sys.stdin.buffer, mode='r|').extractall('/')"


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """The things of a program's working directory that are read after its end."""

    result: str | None
    """A file with the reward."""
    files: bool
    """Whether a grader takes all files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Left:
    """The end of a program, and what it left."""

    result: Result
    reward_file: bytes | OSError = field(default_factory=lambda: OSError(0, "it was not read"))
    """The contents of the wanted file, or why there are none."""
    files: Mapping[str, bytes] = field(default_factory=dict[str, bytes])
    """The regular files of its working directory, where they are wanted."""


async def run_outside(program: Program, limits: Limits, place: Path, door: Door, wanted: Wanted) -> Left:
    """Run a program as a process of this user in the directory `place`, with limits on time and output alone."""
    result = await run_in_box(_ProgramStarter(place, door.key.encode()), program, limits)
    reward_file = OSError(0, "it was not read") if wanted.result is None else _read_plain(place, wanted.result)
    files = await anyio.to_thread.run_sync(_files_of, place) if wanted.files else {}
    return Left(result=result, reward_file=reward_file, files=files)


async def run_inside(
    program: Program, limits: Limits, place: Path, tools: Mapping[str, Path], door: Door, pool: SandboxPool, wanted: Wanted
) -> Left:
    """Run a program in a sandbox that begins with the files of `place`, and reaches nothing but the door.

    Args:
        program: its command and environment.
        limits: of the sandbox.
        place: the files of the task.
        tools: files that the command names, by their names in `PROGRAMS`.
        door: of the episode.
        pool: opens the sandbox.
        wanted: what is read after the program's end.
    """
    packed = await anyio.to_thread.run_sync(_packed, place, tools)
    async with pool.session(limits=limits, port=urlsplit(door.server_url).port) as session:
        unpack = Program(argv=("python3", "-I", "-S", "-W", "ignore", "-c", _UNPACK), stdin=packed)
        filled = await session.run(unpack, timeout_s=_FILL_S)
        if not filled.is_success:
            raise WorkflowError(
                f"workflow.sandbox: the files of the task do not fit into it: {filled.text[-500:]}; raise limits.work_mb, "
                "limits.memory_mb or limits.num_files"
            )
        result = await session.run(program, timeout_s=limits.wall_s)
        reward_file: bytes | OSError = OSError(0, "it was not read")
        files: Mapping[str, bytes] = {}
        if result.ended is Ending.EXITED and not result.state_lost:
            if wanted.result is not None:
                try:
                    reward_file = await session.read(wanted.result, max_bytes=MAX_RESULT_BYTES)
                except OSError as error:
                    reward_file = error
            if wanted.files:
                files = (await session.snapshot()).files
    return Left(result=result, reward_file=reward_file, files=files)


def _packed(place: Path, tools: Mapping[str, Path]) -> bytes:
    """Return the files of a task and those that a command names as they stand in a sandbox, as a tar archive."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for path in sorted(place.iterdir()):
            archive.add(path, f"work/{path.name}")
        for name, path in tools.items():
            archive.add(path.resolve(), f"{PROGRAMS.removeprefix('/')}/{name}")
    return packed.getvalue()


def _read_plain(place: Path, name: str) -> bytes | OSError:
    """Return the contents of a regular file below a directory, or why there are none."""
    path = place / name
    try:
        if not path.resolve().is_relative_to(place.resolve()):
            return OSError(0, "it leads out of the working directory")
        with open(path, "rb", opener=_open_now) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                return OSError(0, "it is no plain file")
            return file.read(MAX_RESULT_BYTES)
    except OSError as error:
        return error


def _open_now(path: str, flags: int) -> int:
    """Open a file without waiting, as a pipe would for its writer."""
    return os.open(path, flags | os.O_NONBLOCK)


def _files_of(place: Path) -> dict[str, bytes]:
    """Return the regular files of a directory; a directory that holds too many is a WorkflowError."""
    found: dict[str, bytes] = {}
    room = _MAX_FILES_BYTES
    for path, _, names, folder in os.fwalk(place):
        for name in names:
            with suppress(OSError):
                descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
                with os.fdopen(descriptor, "rb") as file:
                    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                        continue
                    data = file.read(room + 1)
                room -= len(data)
                found[str(Path(path, name).relative_to(place))] = data
            if room < 0 or len(found) > _MAX_FILES:
                raise WorkflowError(
                    f"workflow.grader: the program left more than {_MAX_FILES} files or {_MAX_FILES_BYTES // MIB} MiB; "
                    "run it with workflow.sandbox, whose limits end it"
                )
    return found


class _ProgramStarter:
    """Starts a program in a directory that stays; the block's end kills its group, and what left it."""

    def __init__(self, place: Path, mark: bytes) -> None:
        self._place, self._mark = str(place), mark

    @asynccontextmanager
    async def start(self, program: Program, limits: Limits, *, use: Use = "program") -> AsyncGenerator[ProcessBox]:
        """Start `program` and yield it."""
        del limits, use
        base = {
            "PATH": os.environ.get("PATH", os.defpath),
            "LANG": "C.UTF-8",
            "HOME": self._place,
            "TMPDIR": self._place,
        }
        try:
            process = PipedProcess(program.argv, environment={**base, **program.environment}, directory=self._place)
        except OSError as error:
            raise ConfigError(f"workflow.command: cannot start {program.argv[0]}: {error.strerror or error}") from error
        box = _MarkedBox(process, self._mark)
        try:
            yield box
        finally:
            await box.kill()
            process.close()


class _MarkedBox(ProcessBox):
    """A process with its group and all that carries its mark."""

    def __init__(self, process: PipedProcess, mark: bytes) -> None:
        super().__init__(process)
        self._mark = mark

    async def kill(self) -> None:
        """End all of them; a second call does nothing."""
        if self._is_dead:
            return
        await super().kill()
        with anyio.CancelScope(shield=True):
            await end_marked(self._mark)
