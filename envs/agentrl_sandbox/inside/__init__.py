"""The programs that run inside a session's sandbox, with nothing but the standard library of its Python.

Invariant: none imports agentrl, and agentrl reads them only as text.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Final

_SOURCES: Final = {
    "program": (),
    "session": ("supervisor.py", "interpreter.py", "capture.py", "streams.py", "changes.py"),
    "forks": ("programs.py", "forks.py", "capture.py"),
    "relay": ("relay.py",),
}


@cache
def files_inside(use: str) -> dict[str, bytes]:
    """Return the sources that a box for this use needs (`agentrl_sandbox.box.Use`), by file name."""
    folder = Path(__file__).parent
    return {name: (folder / name).read_bytes() for name in _SOURCES[use]}
