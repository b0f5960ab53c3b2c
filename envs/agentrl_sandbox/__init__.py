"""Runs code that a model wrote, apart from everything else on the machine.

Example:
    async with open_sandbox() as sandbox:
        result = await sandbox.run(python_program("print(6 * 7)"), Limits(wall_s=5))
        assert result.is_success and result.text == "42"
        async with sandbox.session() as session:  # with a Python, a shell and files that keep their state
            await session.python("x = 6 * 7")
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentrl.support.exports import first_use

if TYPE_CHECKING:
    from agentrl_sandbox.base import Sandbox, SandboxPool
    from agentrl_sandbox.bubblewrap import open_bubblewrap
    from agentrl_sandbox.config import SandboxConfig, open_sandbox
    from agentrl_sandbox.session import Session, WorkspaceDiff, WorkspaceSnapshot, diff_snapshots
    from agentrl_sandbox.types import Ending, Limits, Program, Result, python_program
    from agentrl_sandbox.warm import WarmPython, open_warm_python

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

__getattr__ = first_use(
    __name__,
    {
        "Ending": "agentrl_sandbox.types",
        "Limits": "agentrl_sandbox.types",
        "Program": "agentrl_sandbox.types",
        "Result": "agentrl_sandbox.types",
        "Sandbox": "agentrl_sandbox.base",
        "SandboxConfig": "agentrl_sandbox.config",
        "SandboxPool": "agentrl_sandbox.base",
        "Session": "agentrl_sandbox.session",
        "WarmPython": "agentrl_sandbox.warm",
        "WorkspaceDiff": "agentrl_sandbox.session",
        "WorkspaceSnapshot": "agentrl_sandbox.session",
        "diff_snapshots": "agentrl_sandbox.session",
        "open_bubblewrap": "agentrl_sandbox.bubblewrap",
        "open_sandbox": "agentrl_sandbox.config",
        "open_warm_python": "agentrl_sandbox.warm",
        "python_program": "agentrl_sandbox.types",
    },
)
