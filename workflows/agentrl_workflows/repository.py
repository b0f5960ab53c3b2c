"""A code agent on a small project: it lists, reads and edits files, runs the tests, and submits; hidden tests pay.

The project is data of the episode. Each run of its tests gets a copy in a sandbox of its own, and so does each hidden test
after the last edit, so the model can neither read nor change a hidden test.

    agentrl doctor examples/bundled/repository.yaml
    agentrl train examples/bundled/repository.yaml
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from agentrl.client import Client, MessageLike
from agentrl.client.tools import reply_to
from agentrl.errors import ConfigError
from agentrl.types import Task
from agentrl_workflows.repositories.grading import grade_project
from agentrl_workflows.repositories.project import Project, files_as_bytes
from agentrl_workflows.sandboxed import SandboxedWorkflow

REPOSITORY_SYSTEM = (
    "Solve the issue in the project. List and read its files, edit them, and run the tests. Call `submit` when you are "
    "done. Hidden tests decide whether the issue is solved."
)


class RepositoryAgent(SandboxedWorkflow):
    """Edits the project `task["files"]` until the model submits; pays 1.0 if all hidden tests pass.

    Records `solved`, `passed` (share of hidden tests), `submitted` (0: it stopped, or reached `max_turns`), `edits`,
    `test_runs` and `changed_files`.

    Args:
        max_turns: model calls of one episode.
        partial_credit: pay the share of hidden tests that pass. A project without a change may pass some.
        test_command: of the project.
        max_output_chars: characters of a file or of the tests' output that the model reads.
        system: the system message.
        sandbox: the fields of `SandboxConfig`; its limits hold for each run of the project's tests.
    """

    def __init__(
        self,
        *,
        max_turns: int = 20,
        partial_credit: bool = False,
        test_command: str = "python3 -m unittest discover -s tests -t .",
        max_output_chars: int = 8_000,
        system: str = REPOSITORY_SYSTEM,
        sandbox: Mapping[str, Any] | None = None,
    ) -> None:
        if max_turns < 1 or max_output_chars < 2:
            raise ConfigError(f"max_turns and max_output_chars must be positive, got {max_turns} and {max_output_chars}")
        super().__init__(sandbox)
        self._max_turns, self._partial_credit, self._system = max_turns, partial_credit, system
        self._test_command, self._max_output_chars = tuple(shlex.split(test_command)), max_output_chars

    async def run(self, task: Task, client: Client) -> float:
        """Return 1.0 if the hidden tests pass, else 0.0, or their share.

        Cancellation: running tests are ended.
        """
        project = Project(task["files"], self.sandbox, self._test_command, self._max_output_chars)
        tools = project.tools()
        messages: list[MessageLike] = [
            {"role": "system", "content": self._system},
            {"role": "user", "content": task["question"]},
        ]
        for _ in range(self._max_turns):
            completion = await client.chat.completions.create(messages=messages, tools=[each.schema for each in tools])
            message = completion.choices[0].message
            messages += [message, *[await reply_to(call, tools) for call in message.tool_calls or []]]
            if project.submitted or not message.tool_calls:
                break
        files = files_as_bytes(project.files)
        grade = await grade_project(task, files, self.sandbox, partial_credit=self._partial_credit)
        client.record(solved=grade.is_solved, passed=grade.passed_share, **project.metrics(task["files"]))
        return grade.reward
