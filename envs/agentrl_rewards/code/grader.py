"""Grades responses with code by hidden tests, each in a fresh sandbox.

Invariant: a failure of the sandbox or the machine is an `EnvironmentFault`, never a reward.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final, Protocol

import anyio

from agentrl.env import environment_boundary
from agentrl.errors import ConfigError, EnvironmentFault
from agentrl.support.concurrency import task_group
from agentrl_rewards.code.blocks import last_code_block
from agentrl_rewards.code.cases import HiddenTests
from agentrl_rewards.code.module_run import ModuleTestRun
from agentrl_rewards.code.module_tests import ModuleTests
from agentrl_rewards.code.protocol import CaseGrade, CaseOutcome, grade_case
from agentrl_rewards.code.runner import READY_WIDTH
from agentrl_sandbox.types import Limits, Program, Result

DEFAULT_LIMITS: Final = Limits(wall_s=20, cpu_s=6, memory_mb=512, processes=48, open_files=128)
"""Of one case. Wall time is far over CPU time, so that a busy machine does not make a right submission wrong."""
_ATTEMPTS: Final = 2


class ProgramRunner(Protocol):
    """The part of a `Sandbox` that a grader uses."""

    async def run(self, program: Program, limits: Limits | None = None) -> Result: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeGrade:
    """The grade of one response."""

    cases: tuple[CaseGrade, ...]
    partial_credit: bool = False

    @property
    def passed_share(self) -> float:
        """The share of cases that passed, 0 to 1."""
        return sum(case.passed for case in self.cases) / len(self.cases)

    @property
    def is_solved(self) -> bool:
        return all(case.passed for case in self.cases)

    @property
    def reward(self) -> float:
        """1.0 if all cases passed, else 0.0; with partial credit the share of them."""
        return self.passed_share if self.partial_credit else float(self.is_solved)

    @property
    def metrics(self) -> Mapping[str, float]:
        """The share of each outcome, and `solved`; pass it to `client.record`."""
        counts = Counter(case.outcome for case in self.cases)
        return {"solved": float(self.is_solved)} | {str(each): counts[each] / len(self.cases) for each in CaseOutcome}

    def feedback(self) -> str:
        """Return lines for the policy to read: how many tests passed, and the outcome of the others.

        Feedback never repeats text that a hidden test passed in.
        """
        passed = sum(case.passed for case in self.cases)
        kinds = {case.error for case in self.cases}
        error = next(iter(kinds)) if len(kinds) == 1 else None
        lines = [f"{passed} of {len(self.cases)} tests passed."]
        for number, case in enumerate(self.cases, 1):
            if not case.passed:
                is_raised = case.outcome is CaseOutcome.RAISED
                outcome = f"raised {error or 'an error'}" if is_raised else case.outcome.replace("_", " ")
                lines.append(f"Test {number}: {outcome}")
        return "\n".join(lines)


class CodeGrader:
    """Grades responses by hidden tests.

    Args:
        sandbox: for the submissions.
        limits: of one case.
        num_concurrent: sandboxes at a time; None: one for each CPU. The wait for a place does not count as time.
        partial_credit: whether the reward is the share of cases that passed. A constant answer often earns a share.
        max_timeouts: cases of one submission that may reach a time limit; the cases after them fail without being run.
        max_code_chars: a submission that is longer fails.
        extract: finds the code in a response; by default `last_code_block`.

    Example:
        grader = CodeGrader(await open_bubblewrap())
        reward = await grader(response, call_tests([("add(1, 2)", "3"), ("add(2, 2)", "4")]))
    """

    def __init__(
        self,
        sandbox: ProgramRunner,
        *,
        limits: Limits = DEFAULT_LIMITS,
        num_concurrent: int | None = None,
        partial_credit: bool = False,
        max_timeouts: int = 2,
        max_code_chars: int = 100_000,
        extract: Callable[[str], str | None] = last_code_block,
    ) -> None:
        places = os.cpu_count() or 1 if num_concurrent is None else num_concurrent
        for name, number in (("num_concurrent", places), ("max_timeouts", max_timeouts), ("max_code_chars", max_code_chars)):
            if number < 1:
                raise ConfigError(f"CodeGrader: {name} must be at least 1, got {number}")
        self._sandbox, self._extract = sandbox, extract
        self._partial_credit, self._max_timeouts, self._max_code_chars = partial_credit, max_timeouts, max_code_chars
        # The first line of the runner does not count as output of the submission.
        self._limits_with_ready = limits.model_copy(update={"output_kb": limits.output_kb + READY_WIDTH // 1024 + 1})
        self._places = anyio.CapacityLimiter(places)

    async def __call__(self, response: str | None, tests: HiddenTests) -> float:
        """Return the reward of a response; `grade` also says why."""
        return (await self.grade(response, tests)).reward

    async def grade(self, response: str | None, tests: HiddenTests) -> CodeGrade:
        """Run the code of a response through all tests; a sandbox that fails twice in one case is an EnvironmentFault."""
        source = self._extract(response or "")
        if source is None or not source.strip() or len(source) > self._max_code_chars:
            cases = [CaseGrade(outcome=CaseOutcome.NO_CODE)] * len(tests.cases)
        else:
            with environment_boundary("code grader"):
                cases = await _Submission(partial(self._run_case, source, tests), len(tests.cases), self._max_timeouts).run()
        return CodeGrade(cases=tuple(cases), partial_credit=self._partial_credit)

    async def _run_case(self, source: str, tests: HiddenTests, index: int) -> CaseGrade:
        async with self._places:
            for _ in range(_ATTEMPTS - 1):
                try:
                    return await self._attempt(source, tests, index)
                except EnvironmentFault:
                    continue
            return await self._attempt(source, tests, index)

    async def _attempt(self, source: str, tests: HiddenTests, index: int) -> CaseGrade:
        if isinstance(tests, ModuleTests):
            return await ModuleTestRun(source, tests, index, self._run_program).grade()
        return await grade_case(source, tests, index, self._run_program)

    async def _run_program(self, program: Program) -> Result:
        return await self._sandbox.run(program, self._limits_with_ready)


class _Submission:
    """The cases of one submission, which run side by side until too many of them have reached a time limit."""

    def __init__(self, run_case: Callable[[int], Awaitable[CaseGrade]], num_cases: int, max_timeouts: int) -> None:
        self._run_case, self._max_timeouts = run_case, max_timeouts
        self._grades: dict[int, CaseGrade] = {}
        self._scopes = [anyio.CancelScope() for _ in range(num_cases)]

    async def run(self) -> list[CaseGrade]:
        async with task_group() as tasks:
            for index in range(len(self._scopes)):
                tasks.start_soon(self._run_one, index)
        left_out = CaseGrade(outcome=CaseOutcome.NOT_RUN)
        num_run = self._num_run()
        return [self._grades[index] if index < num_run else left_out for index in range(len(self._scopes))]

    async def _run_one(self, index: int) -> None:
        with self._scopes[index]:
            self._grades[index] = await self._run_case(index)
            for scope in self._scopes[self._num_run() :]:
                scope.cancel()

    def _num_run(self) -> int:
        late = sorted(index for index, grade in self._grades.items() if grade.outcome is CaseOutcome.TIMEOUT)
        return late[self._max_timeouts - 1] + 1 if len(late) >= self._max_timeouts else len(self._scopes)
