"""The programs that run inside a session's sandbox, with nothing but the standard library of its Python.

Invariant: none imports agentrl, and agentrl reads them only as text.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path


@cache
def supervisor_files() -> dict[str, bytes]:
    """Return the sources of what runs a session, by file name."""
    return _sources("supervisor.py", "interpreter.py", "capture.py")


@cache
def warm_files() -> dict[str, bytes]:
    """Return the sources of what forks a warm Python, by file name."""
    return _sources("programs.py", "forks.py", "walls.py", "capture.py")


def _sources(*names: str) -> dict[str, bytes]:
    folder = Path(__file__).parent
    return {name: (folder / name).read_bytes() for name in names}
