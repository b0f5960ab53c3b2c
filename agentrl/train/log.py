"""The trainer worker's log: opened for the process, quoted when it dies.

Invariant: a log that cannot be written or read is said so in a message, never in a traceback.
"""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO

from agentrl.errors import ConfigError

_TAIL_BYTES = 4000
"""End of the log that a message carries."""


def open_log(path: Path) -> BinaryIO:
    """Return the log, open for appending.

    Raises:
        ConfigError: when it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return path.open("ab")
    except OSError as error:
        raise ConfigError(f"cannot write the trainer worker's log {path}: {error.strerror}") from error


def log_tail(path: Path) -> str:
    """Return the end of the log."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            return file.read().decode(errors="replace").strip() or "(nothing was written)"
    except OSError as error:
        return f"(cannot be read: {error.strerror})"
