r"""Tool-integrated math: the model computes in a Python session of its own and gives its answer in `\boxed{...}`.

The session runs in the sandbox and keeps its variables through the turns of the episode.

    agentrl doctor examples/bundled/math_python.yaml
    agentrl train examples/bundled/math_python.yaml
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from agentrl.client import Client, MessageLike
from agentrl.client.tools import tool
from agentrl.errors import ConfigError
from agentrl.types import Task
from agentrl_rewards.equivalence import MathGrader
from agentrl_rewards.extract import boxes
from agentrl_workflows.sandboxed import SandboxedWorkflow, output_for_model

PYTHON_SYSTEM = r"Solve the problem. Compute with the tool `python`. Give the final answer in \boxed{}."


class MathPython(SandboxedWorkflow):
    r"""Calls `python` until the model answers `task["question"]`; pays 1.0 for an answer equivalent to `task["answer"]`.

    Records `correct`, `python_calls` and `python_errors`. An answer that is not in a box is wrong.

    Args:
        max_turns: model calls of one episode.
        max_output_chars: characters of one output that the model reads.
        system: the system message.
        num_workers: grading processes at most.
        sandbox: the fields of `SandboxConfig`; its limits hold for each session.
    """

    def __init__(
        self,
        *,
        max_turns: int = 8,
        max_output_chars: int = 4_000,
        system: str = PYTHON_SYSTEM,
        num_workers: int = 2,
        sandbox: Mapping[str, Any] | None = None,
    ) -> None:
        if max_turns < 1 or max_output_chars < 2:
            raise ConfigError(f"max_turns and max_output_chars must be positive, got {max_turns} and {max_output_chars}")
        super().__init__(sandbox)
        self._grader = MathGrader(extract=boxes, num_workers=num_workers)
        self._max_turns, self._max_output_chars, self._system = max_turns, max_output_chars, system

    @asynccontextmanager
    async def opened(self) -> AsyncGenerator[None]:
        """Open the sandbox, and end the grading processes with the run.

        Raises:
            ConfigError: this machine cannot run the sandbox.

        Cancellation: both are closed.
        """
        try:
            async with super().opened():
                yield
        finally:
            self._grader.close()

    async def run(self, task: Task, client: Client) -> float:
        """Return 1.0 for the right answer, else 0.0.

        Cancellation: the session is ended.
        """
        calls = errors = 0
        async with self.sandbox.session() as session:

            @tool
            async def python(code: str) -> str:
                """Run Python code. Variables stay until the end; the value of the last expression is printed."""
                nonlocal calls, errors
                result = await session.python(code)
                calls, errors = calls + 1, errors + (not result.is_success)
                return output_for_model(result, self._max_output_chars)

            messages: list[MessageLike] = [
                {"role": "system", "content": self._system},
                {"role": "user", "content": task["question"]},
            ]
            answer = None
            for _ in range(self._max_turns):
                completion = await client.chat.completions.create(messages=messages, tools=[python.schema])
                message = completion.choices[0].message
                if not message.tool_calls:
                    answer = message.content
                    break
                messages += [message, *[await python.reply(call) for call in message.tool_calls]]
        client.final_answer(boxes(answer or ""))
        reward = await self._grader(answer, str(task["answer"]))
        client.record(correct=reward, python_calls=calls, python_errors=errors)
        return reward
