"""A program, its limits, and its result.

Invariant: a result describes what the program did. A sandbox that could not do its own part raises `EnvironmentFault`.
"""

from __future__ import annotations

import signal as signals
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import PurePosixPath
from typing import NamedTuple

from pydantic import Field

from agentrl.config.base import Config
from agentrl.errors import ConfigError

MAX_FILES = 256
"""Files that a run can bring along; a session takes more, in several writes."""
MIB = 2**20


class FileContents(NamedTuple):
    """A file without a machine."""

    content: bytes
    can_run: bool
    mode: int | None = None
    """Its permissions; None: 0755 of a program, and else 0644."""


class Limits(Config):
    """Upper bounds of one run, or of one session and each call in it."""

    wall_s: float = Field(default=10.0, gt=0, le=86_400)
    """Seconds from the start of a run to its end, or of one call of a session."""
    cpu_s: int = Field(default=60, ge=1)
    """CPU seconds for each process, in a session for each call; the kernel ends a process over it with SIGXCPU."""
    memory_mb: int = Field(default=512, ge=32)
    """Memory of all processes and of the files below, in MiB. A program over it is ended, at most some 20 ms later."""
    address_space_mb: int | None = Field(default=None, ge=32)
    """Address space of each process, in MiB; None: as much as `memory_mb`. Node and Java reserve far more than they use."""
    processes: int = Field(default=64, ge=4, le=4096)
    """Processes and threads at a time, with the few of the sandbox itself."""
    open_files: int = Field(default=256, ge=16)
    """Open descriptors of each process."""
    work_mb: int = Field(default=64, ge=1)
    """Contents of the working directory, in MiB; they live in memory."""
    temp_mb: int = Field(default=64, ge=1)
    """Contents of `/tmp`, in MiB."""
    shared_mb: int = Field(default=16, ge=1)
    """Contents of `/dev/shm`, in MiB."""
    num_files: int = Field(default=4096, ge=64)
    """Files and directories of these three together; a program over it is ended."""
    output_kb: int = Field(default=1024, ge=1)
    """Standard output and standard error, in KiB each; a program over it is ended."""


class Ending(StrEnum):
    """The reason for a program's end."""

    EXITED = "exited"
    """By itself; `exit_status` is its own."""
    KILLED = "killed"
    """By a signal, such as a crash, its own kill or the CPU limit; `signal` names it."""
    TIMEOUT = "timeout"
    """It reached `Limits.wall_s`."""
    MEMORY = "memory"
    """It reached `Limits.memory_mb`."""
    OUTPUT = "output"
    """It reached `Limits.output_kb`."""
    FILES = "files"
    """It reached `Limits.num_files`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A command with its files and input. `python_program` makes one from Python source."""

    argv: tuple[str, ...]
    """The command; `python3` is the Python of the sandbox."""
    files: Mapping[str, bytes] = field(default_factory=dict[str, bytes])
    """Contents by path relative to the working directory; at most `MAX_FILES`, which a run holds open at once."""
    stdin: bytes = b""
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    """Added to the four variables that every program gets: PATH, HOME, LANG and TMPDIR."""
    inherited: tuple[int, ...] = ()
    """Descriptors of this process that a box of bubblewrap inherits under the same numbers."""

    def __post_init__(self) -> None:
        if not self.argv or not self.argv[0] or any("\0" in word for word in self.argv):
            raise ConfigError(f"program: expected a command without NUL bytes, got {self.argv!r}")
        check_files(self.files)
        for name, value in self.environment.items():
            if not name or "=" in name or "\0" in name + value:
                raise ConfigError(f"program environment: expected names without '=' and no NUL bytes, got {name!r}")


def python_program(
    source: str,
    *,
    arguments: Sequence[str] = (),
    files: Mapping[str, bytes] | None = None,
    stdin: bytes = b"",
    environment: Mapping[str, str] | None = None,
) -> Program:
    """Return a program that runs `source` as `main.py` beside `files`, among which no other `main.py` may be."""
    if files is not None and "main.py" in files:
        raise ConfigError("python_program: `main.py` is the source itself; give the file another name")
    return Program(
        argv=("python3", "main.py", *arguments),
        files={**(files or {}), "main.py": source.encode(errors="surrogatepass")},
        stdin=stdin,
        environment=environment or {},
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The end and the output of a program. The program itself wrote its output and chose its exit status."""

    ended: Ending
    exit_status: int | None = None
    """0 to 255 of a program that exited by itself, otherwise None."""
    signal: int | None = None
    """Of a program that a signal ended. By the convention of shells, an exit status over 128 reads as a signal too."""
    stdout: bytes = b""
    """At most `Limits.output_kb`."""
    stderr: bytes = b""
    """At most `Limits.output_kb`."""
    wall_s: float = 0.0
    """From the start of the sandbox to its end, or of one call; waiting for a slot of a pool does not count."""
    queue_s: float = 0.0
    """Seconds in which the program waited for a free slot of a pool."""
    peak_memory_bytes: int | None = None
    """The largest of the samples taken every 20 ms, all processes and files together; None where there is none."""
    state_lost: bool = False
    """Whether the variables, the working directory and the jobs of a session's Python or shell are gone."""

    @property
    def is_success(self) -> bool:
        """Whether the program exited by itself with status 0."""
        return self.ended is Ending.EXITED and self.exit_status == 0

    @property
    def text(self) -> str:
        """The output for a model to read: standard output, standard error, and one line on an end that is no success."""
        parts = [self.stdout.decode(errors="replace"), self.stderr.decode(errors="replace"), self._remark()]
        return "\n".join(part.rstrip("\n") for part in parts if part)

    def _remark(self) -> str:
        if self.is_success:
            return ""
        if self.ended is Ending.EXITED:
            return f"[exit status {self.exit_status}]"
        if self.ended is Ending.KILLED:
            return f"[ended by {signal_name(self.signal)}]"
        return f"[ended: {self.ended} limit]"


def signal_name(number: int | None) -> str:
    """Return `SIGSEGV` for 11, `signal 99` for what has no name.

    Example:
        >>> signal_name(11), signal_name(99)
        ('SIGSEGV', 'signal 99')
    """
    if number is None:
        return "the sandbox"
    try:
        return signals.Signals(number).name
    except ValueError:
        return f"signal {number}"


def check_files(files: Mapping[str, bytes]) -> None:
    """Refuse paths that leave the working directory, and more than `MAX_FILES`.

    Example:
        >>> check_files({"tests/test_a.py": b""})
        >>> check_files({"../a": b""})
        Traceback (most recent call last):
        ...
        agentrl.errors.ConfigError: sandbox file '../a': expected a relative path without '..', such as 'tests/data.txt'
    """
    if len(files) > MAX_FILES:
        raise ConfigError(f"sandbox files: expected at most {MAX_FILES}, got {len(files)}")
    check_paths(files)


def check_paths(names: Iterable[str]) -> None:
    """Refuse paths that leave the working directory."""
    for name in names:
        path = PurePosixPath(name)
        if not name or path.is_absolute() or ".." in path.parts or "\0" in name or str(path) in (".", ""):
            raise ConfigError(f"sandbox file {name!r}: expected a relative path without '..', such as 'tests/data.txt'")
