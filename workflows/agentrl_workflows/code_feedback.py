"""Code with test feedback: the model writes a function, reads what went wrong when it ran, and corrects it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Literal

from agentrl.client import Client, MessageLike
from agentrl.errors import ConfigError, WorkflowError
from agentrl.types import Task
from agentrl_rewards.code import CallCase, CaseOutcome, CodeGrade, CodeGrader, FunctionTests, HiddenTests, read_tests
from agentrl_rewards.code.cases import best_constant
from agentrl_rewards.code.grader import DEFAULT_LIMITS
from agentrl_sandbox import Limits, open_warm_python
from agentrl_workflows.sandboxed import SandboxedWorkflow


class CodeFeedback(SandboxedWorkflow):
    """Up to `max_attempts` programs for one task; the last one counts.

    A task has `question`, `tests` (hidden) and optionally `examples` (public), both for `read_tests`. Hidden tests run once
    all examples pass. Feedback shows the first example that failed, with what was expected; of each hidden test that failed
    it shows the outcome alone, since what the program writes or raises may tell the hidden arguments.

    The reward is the credit of the last attempt, times `retry_factor` for each attempt before it. The best attempt does not
    count: the model hands in its last one. Records `success` (all tests passed), `attempts`, and for each attempt N
    `passed_share.N`, the share of hidden tests that passed, 0 where an example failed.

    Args:
        max_attempts: programs of one episode.
        credit: `full`: 1.0 if all hidden tests passed, else 0.0; `partial`: the share that passed. With `partial` a program
            that returns a constant earns something on most tasks.
        retry_factor: factor of the reward for each attempt that failed.
        retry_request: what the model reads after the feedback.
        sandbox: fields of a `SandboxConfig`.
        start: `cold`: a new sandbox for each test; `warm`: forks of an interpreter, as apart and cheaper.
        limits: fields of `Limits` of one test that take the place of the grader's own.
    """

    def __init__(
        self,
        *,
        max_attempts: int = 3,
        credit: Literal["partial", "full"] = "full",
        retry_factor: float = 0.9,
        retry_request: str = "\nCorrect the program, and answer with the whole of it in one block of Python code.",
        sandbox: Mapping[str, Any] | None = None,
        start: Literal["cold", "warm"] = "cold",
        limits: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(sandbox)
        if max_attempts < 1 or not 0 < retry_factor <= 1:
            raise ConfigError(f"expected max_attempts >= 1 and 0 < retry_factor <= 1, got {max_attempts} and {retry_factor}")
        if credit not in ("partial", "full") or start not in ("cold", "warm"):
            raise ConfigError(f"expected credit partial or full and start cold or warm, got {credit!r} and {start!r}")
        self._max_attempts, self._retry_factor, self._retry_request = max_attempts, retry_factor, retry_request
        self._is_partial, self._is_warm = credit == "partial", start == "warm"
        self._limits = Limits.model_validate({**DEFAULT_LIMITS.model_dump(), **(limits or {})})
        self._grader: CodeGrader | None = None

    def guess(self, task: Task) -> str | None:
        """Return the program whose constant answer passes the most hidden tests."""
        constant = best_constant(read_tests(task["tests"]))
        return f"```python\n{constant[0]}```" if constant else None

    @asynccontextmanager
    async def opened(self) -> AsyncGenerator[None]:
        """Keep the sandbox open between episodes.

        Raises:
            ConfigError: this machine has no such sandbox.

        Cancellation: every process of it is dead first.
        """
        async with super().opened(), AsyncExitStack() as stack:
            runner = await stack.enter_async_context(open_warm_python(self.sandbox)) if self._is_warm else self.sandbox
            self._grader = CodeGrader(runner, limits=self._limits, partial_credit=self._is_partial)
            yield

    async def run(self, task: Task, client: Client) -> float:
        """Return the reward of the last attempt.

        Cancellation: the programs of the episode are ended.
        """
        messages: list[MessageLike] = [{"role": "user", "content": task["question"]}]
        attempt = 0
        while True:
            attempt += 1
            completion = await client.chat.completions.create(messages=messages)
            message = completion.choices[0].message
            grade, feedback = await self._judge(message.content or "", task)
            is_solved = grade is not None and grade.is_solved
            client.record(attempts=attempt, success=is_solved)
            client.record(**{f"passed_share.{attempt}": grade.passed_share if grade else 0.0})
            if is_solved or attempt == self._max_attempts:
                return grade.reward * self._retry_factor ** (attempt - 1) if grade else 0.0
            messages += [message, {"role": "user", "content": f"{feedback}{self._retry_request}"}]

    async def _judge(self, response: str, task: Task) -> tuple[CodeGrade | None, str]:
        """Return the grade by the hidden tests, None if an example fails, and the feedback."""
        if self._grader is None:
            raise WorkflowError("CodeFeedback: its sandbox is closed; run episodes inside `async with workflow.opened()`")
        if "examples" in task.data:
            examples = read_tests(task["examples"])
            grade = await self._grader.grade(response, examples)
            if not grade.is_solved:
                return None, describe_failed_example(examples, grade)
        grade = await self._grader.grade(response, read_tests(task["tests"]))
        return grade, _without_code(grade) or grade.feedback()


def describe_failed_example(examples: HiddenTests, grade: CodeGrade) -> str:
    """Return what a program did in the first example that it failed, and what was expected."""
    if missing := _without_code(grade):
        return missing
    case, found = next((case, found) for case, found in zip(examples.cases, grade.cases, strict=True) if not found.passed)
    did = f"returned {found.returned}" if found.returned is not None else found.detail or found.outcome.replace("_", " ")
    if isinstance(case, str):
        return f"In {case} of the test file, the program {did}."
    if isinstance(examples, FunctionTests) and isinstance(case, CallCase):
        arguments = [*map(repr, case.arguments), *(f"{name}={value!r}" for name, value in case.keywords.items())]
        return f"{examples.entry}({', '.join(arguments)}) {did}, expected {case.expected!r}."
    return f"With the input {getattr(case, 'stdin', '')!r}, the program {did}, expected {case.expected!r}."


def _without_code(grade: CodeGrade) -> str:
    has_none = all(case.outcome is CaseOutcome.NO_CODE for case in grade.cases)
    return "The answer has no block of Python code." if has_none else ""
