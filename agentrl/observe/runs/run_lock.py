"""One process at a time writes a run directory.

Invariant: the lock lies beside the directory, so that deleting the directory does not release it. The kernel releases it
when the process ends, however it ends; forked children do not hold it.
"""

from __future__ import annotations

import fcntl
import os
import struct
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from agentrl.errors import ConfigError

_FLOCK: Final = "hhqqi4x"
"""Linux's `struct flock`: type, whence, start, length, process."""


@contextmanager
def run_lock(run_dir: Path) -> Generator[None]:
    """Hold the lock of `run_dir` for the length of the block. Not for two runs of one process.

    Raises:
        ConfigError: another process holds it, or the lock file cannot be written.
    """
    path = run_dir.parent / f".{run_dir.name}.lock"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise ConfigError(f"cannot write the lock of the run directory, {path}: {error.strerror}") from error
    try:
        try:
            # A POSIX record lock: unlike flock, children that a workflow forks do not inherit it.
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError) as error:
            raise ConfigError(
                f"{run_dir} belongs to a run that is running, process {_owner(descriptor)}; wait for its end, stop it, or "
                "choose another --name"
            ) from error
        except OSError as error:
            raise ConfigError(f"cannot lock the run directory by {path}: {error.strerror}") from error
        os.truncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(descriptor)


def _owner(descriptor: int) -> str:
    return os.pread(descriptor, 32, 0).decode(errors="replace").strip() or "unknown"


def is_locked(run_dir: Path) -> bool:
    """Return whether a process of this machine runs `run_dir` now. It asks and does not lock, so it disturbs no start."""
    try:
        descriptor = os.open(run_dir.parent / f".{run_dir.name}.lock", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        whole_file = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        kind, *_ = struct.unpack(_FLOCK, fcntl.fcntl(descriptor, fcntl.F_GETLK, whole_file))
        return kind != fcntl.F_UNLCK
    finally:
        os.close(descriptor)
