"""An agent that is a program of its own, in the container of its task: it reaches the policy by a door, and nothing else.

Example:
    workflow: agentrl_workflows.terminal:TerminalCommand
    workflow_args: {command: [python3, /opt/agent.py, "{question}"], files: {/opt/agent.py: my_agent.py}}
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal

from agentrl.client import Client
from agentrl.errors import ConfigError, EnvironmentFault
from agentrl.types import Task
from agentrl_sandbox import Ending
from agentrl_sandbox.containers import LayerFile
from agentrl_workflows.terminal.episode import TerminalWorkflow
from agentrl_workflows.terminal.scripts import end_of_output
from agentrl_workflows.terminal.workplace import Workplace

_NOT_STARTED: Final = (126, 127)
"""By the convention of shells: a program that cannot be run, and one that is not there."""


class TerminalCommand(TerminalWorkflow):
    """Runs a command in the container of each task; pays what the task's own tests say of what it left.

    Records `exit_status` (-1: it was ended at a limit), and what `TerminalWorkflow` records.

    Args:
        command: the program and its arguments; in each word `{question}` stands for the instruction.
        env: variables beside those of the door and of the task.
        files: files of this machine that the container has, by their absolute paths in it.
        timeout_s: seconds that the program has, where the task allows no less.
        no_call: a program that ends without a call of the policy is a failure (`fail`), or what the tests say (`allow`).
        **settings: those of `TerminalWorkflow`.
    """

    served = True

    def __init__(
        self,
        *,
        command: Sequence[str],
        env: Mapping[str, str] | None = None,
        files: Mapping[str, str] | None = None,
        timeout_s: float = 3600.0,
        no_call: Literal["fail", "allow"] = "fail",
        **settings: Any,  # noqa: ANN401 - those of the base class, which checks them
    ) -> None:
        super().__init__(**settings)
        if not command or timeout_s <= 0:
            raise ConfigError(f"expected a command and seconds above 0, got {list(command)} and {timeout_s}")
        self._command, self._env, self._timeout_s = tuple(command), dict(env or {}), timeout_s
        if no_call not in ("fail", "allow"):
            raise ConfigError(f"workflow_args.no_call: expected fail or allow, got {no_call!r:.40}")
        self.no_call = no_call
        self._files = {inside: Path(path).resolve() for inside, path in (files or {}).items()}
        missing = [str(path) for path in self._files.values() if not path.is_file()]
        if missing:
            raise ConfigError(f"workflow_args.files: there is no file {missing[0]}")

    def programs(self) -> Mapping[str, LayerFile]:
        """Return the files of the run file."""
        return dict(self._files)

    async def work(self, task: Task, client: Client, place: Workplace) -> None:
        """Run the program to its end, or to the task's time.

        Raises:
            EnvironmentFault: it cannot be started.
        """
        assert place.door is not None
        words = [word.replace("{question}", str(task["question"])) for word in self._command]
        allowed_s = min(self._timeout_s, place.harbor.agent_timeout_s or self._timeout_s)
        environment = {**place.door.environment(), **self._env}
        result = await place.container.execute(words, environment=environment, timeout_s=allowed_s)
        client.settle_refusals()  # the model's commands could send one to escape the tests
        if client.unresolved_error is not None:
            raise client.unresolved_error
        if result.ended is Ending.EXITED and result.exit_status in _NOT_STARTED and not client.turns:
            raise EnvironmentFault(f"{words[0]} cannot be started in the container: {end_of_output(result)}")
        client.record(exit_status=-1 if result.exit_status is None else result.exit_status)
