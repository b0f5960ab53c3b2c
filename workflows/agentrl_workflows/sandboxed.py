"""What the workflows share that run a model's code: one sandbox for all episodes, and its output as a tool's reply."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from agentrl.errors import WorkflowError
from agentrl.workflow import RolloutWorkflow
from agentrl_sandbox import Result, SandboxConfig, SandboxPool, open_sandbox


class SandboxedWorkflow(RolloutWorkflow):
    """A workflow whose episodes run code in one sandbox, which is tested and opened once, in `opened`.

    A sandbox that cannot start ends the run before its first episode; one that breaks in an episode is its
    `environment_fault`.

    Args:
        sandbox: the fields of `agentrl_sandbox.SandboxConfig`.
    """

    def __init__(self, sandbox: Mapping[str, Any] | None = None) -> None:
        self.sandbox_config = SandboxConfig.model_validate(sandbox or {})
        """Which sandbox `opened` opens; `agentrl doctor` tests it."""
        self._sandbox: SandboxPool | None = None

    @property
    def sandbox(self) -> SandboxPool:
        """The open sandbox.

        Raises:
            WorkflowError: `opened` was not entered.
        """
        if self._sandbox is None:
            raise WorkflowError(f"{self.name}: its sandbox is closed; run episodes inside `async with workflow.opened():`")
        return self._sandbox

    @asynccontextmanager
    async def opened(self) -> AsyncGenerator[None]:
        """Open the sandbox.

        Raises:
            ConfigError: this machine cannot run it.

        Cancellation: it is closed.
        """
        async with open_sandbox(self.sandbox_config) as sandbox:
            self._sandbox = sandbox
            try:
                yield
            finally:
                self._sandbox = None


def output_for_model(result: Result, max_chars: int) -> str:
    r"""Return what a program printed, for the model to read; of a long output the beginning and the end.

    Example:
        >>> from agentrl_sandbox import Ending
        >>> output_for_model(Result(ended=Ending.EXITED, exit_status=0, stdout=b"0123456789"), 4)
        '01\n[6 characters left out]\n89'
    """
    text = result.text
    if len(text) <= max_chars:
        return text or "(no output)"
    half = max_chars // 2
    return f"{text[:half]}\n[{len(text) - 2 * half} characters left out]\n{text[-half:]}"
