"""Runs code that a model wrote, apart from everything else on the machine.

Example:
    async with open_sandbox() as sandbox:
        result = await sandbox.run(python_program("print(6 * 7)"), Limits(wall_s=5))
        assert result.is_success and result.text == "42"
        async with sandbox.session() as session:  # with a Python, a shell and files that keep their state
            await session.python("x = 6 * 7")
"""

from __future__ import annotations

from agentrl.sandbox.base import Sandbox, SandboxPool
from agentrl.sandbox.bubblewrap import open_bubblewrap
from agentrl.sandbox.config import SandboxConfig, open_sandbox
from agentrl.sandbox.session import Session, WorkspaceDiff, WorkspaceSnapshot, diff_snapshots
from agentrl.sandbox.types import Ending, Limits, Program, Result, python_program
from agentrl.sandbox.warm import WarmPython, open_warm_python

__all__ = [
    "Ending",
    "Limits",
    "Program",
    "Result",
    "Sandbox",
    "SandboxConfig",
    "SandboxPool",
    "Session",
    "WarmPython",
    "WorkspaceDiff",
    "WorkspaceSnapshot",
    "diff_snapshots",
    "open_bubblewrap",
    "open_sandbox",
    "open_warm_python",
    "python_program",
]
