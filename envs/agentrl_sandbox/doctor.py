"""The check of `agentrl doctor`: the sandbox of a workflow tests itself and runs one program."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial

from agentrl.errors import EnvironmentFault
from agentrl.workflow import RolloutWorkflow
from agentrl_sandbox import SandboxConfig, open_sandbox, python_program


def check_sandbox(workflow: RolloutWorkflow) -> Callable[[], Awaitable[str]] | None:
    """Return the check of the sandbox that a workflow runs programs in; None where it has none."""
    config = getattr(workflow, "sandbox_config", None)
    return partial(_tested_sandbox, config) if isinstance(config, SandboxConfig) else None


async def _tested_sandbox(config: SandboxConfig) -> str:
    """Open the sandbox of the workflow, which tests itself, and run one program."""
    async with open_sandbox(config) as sandbox:
        result = await sandbox.run(python_program("print(6 * 7)"))
        if result.text != "42":
            raise EnvironmentFault(f"sandbox {sandbox.name}: a program that prints 42 gave: {result.text}")
        isolation = "isolated" if sandbox.is_isolated else "NOT isolated"
        return f"{sandbox.name}: {isolation}; a program ran in {result.wall_s:.2f} s"
