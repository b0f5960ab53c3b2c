"""One test function of a test file: its calls travel to the submission, and the answers back, between sandboxes.

Invariant: only plain values and names of exceptions travel, so a submission cannot touch an assertion.
"""

from __future__ import annotations

import json
from functools import partial
from typing import Final, cast

from agentrl.errors import EnvironmentFault
from agentrl.support.foreign import one_line, shortened
from agentrl_rewards.code.compare import read_tree
from agentrl_rewards.code.module_program import TEST_FILE
from agentrl_rewards.code.module_tests import ModuleTests
from agentrl_rewards.code.protocol import (
    FORGED,
    GRADER_FOLDER,
    MAX_DETAIL,
    CaseFinding,
    CaseGrade,
    CaseOutcome,
    Job,
    RunProgram,
    call_job,
    error_text,
    error_words,
    failed_ending,
    grader_files,
    make_job,
    output_after,
    read_result,
    sent_answer,
    sent_line,
)
from agentrl_rewards.code.values import tree_text
from agentrl_sandbox.types import Result

MAX_TEST_CALLS: Final = 100
"""Calls of the submission by one test function; each is a run of two sandboxes."""
_TEST_COMMAND: Final = ("/bin/sh", "-c", f"exec python3 {GRADER_FOLDER}/module_program.py")
"""By a shell, so that a warm interpreter, in which submissions have run, never runs a test: it passes on all but Python."""
MAX_ANSWER_CHARS: Final = 4_000_000


class ModuleTestRun:
    """One test function of one submission."""

    def __init__(self, source: str, tests: ModuleTests, index: int, run: RunProgram) -> None:
        self._source, self._tests, self._test, self._run = source, tests, tests.cases[index], run
        self._wall_s = 0.0

    async def grade(self) -> CaseGrade:
        """Run the test, and the submission for each call in it.

        A test that fails or ends before it has asked the submission for anything is an EnvironmentFault.
        """
        return (await self._find()).graded(self._wall_s)

    async def _find(self) -> CaseFinding:
        calls: list[list[str]] = []
        answers: list[list[str]] = []
        while True:
            step = await self._next_call(answers)
            if isinstance(step, CaseFinding):
                return step
            if len(calls) == MAX_TEST_CALLS:
                return CaseFinding(CaseOutcome.TIMEOUT, f"called more than {MAX_TEST_CALLS} times in one test")
            calls.append(cast("list[str]", json.loads(step)))
            answer = await self._answer(calls)
            if isinstance(answer, CaseFinding):
                return answer
            answers.append([step, *answer])
            if sum(len(text) for _, _, text in answers) > MAX_ANSWER_CHARS:
                return CaseFinding(CaseOutcome.OUTPUT, f"returned more than {MAX_ANSWER_CHARS} characters in one test")

    async def _next_call(self, answers: list[list[str]]) -> CaseFinding | str:
        """Run the test with these answers; return its next call, or its end."""
        source = self._tests.source.encode(errors="surrogatepass")
        files = {f"{GRADER_FOLDER}/{TEST_FILE}.py": source, **grader_files("module_program", "runner", "values")}
        job = make_job(_TEST_COMMAND, files, {"module": self._tests.module, "test": self._test, "answers": answers})
        result = await self._ran(job)
        line = sent_line(output_after(job.nonce, result), job.nonce)
        stopped = failed_ending(result)
        if stopped is None and line is not None and line[0] == "call":
            return line[1]
        told = stopped.detail if stopped else " ".join(line or ("it sent nothing",))
        if not answers or (line is not None and line[0] in ("unsupported", "changed")):
            raise EnvironmentFault(
                f"tests: expected {self._test} to call the submission with plain values, the same ones each time, and to "
                f"end only after that, got: {shortened(one_line(told), MAX_DETAIL)}; correct the test file"
            )
        if stopped:
            return CaseFinding(stopped.outcome, f"the test {stopped.detail}")
        if line is None:
            return CaseFinding(CaseOutcome.NO_RESULT, "the test ended its process")
        if line[0] == "passed":
            return CaseFinding(CaseOutcome.PASSED)
        if line[0] == "raised":
            return CaseFinding(CaseOutcome.RAISED, error_text(answers[-1][2]))
        name = str(cast("list[object]", json.loads(line[1]))[0])
        return CaseFinding(
            CaseOutcome.WRONG_VALUE, "failed an assertion" if name == "AssertionError" else f"{name} in the test"
        )

    async def _answer(self, calls: list[list[str]]) -> CaseFinding | tuple[str, str]:
        """Run the submission through these calls; return the kind and text of its last answer, or the failure."""
        *earlier, (entry, arguments, keywords) = calls
        call = {"entry": entry, "arguments": arguments, "keywords": keywords, "earlier": earlier, "in_order": True}
        job = call_job(self._source, call)
        result = await self._ran(job)
        return await read_result(partial(_read_answer, output_after(job.nonce, result), job.nonce), result)

    async def _ran(self, job: Job) -> Result:
        result = await self._run(job.program)
        self._wall_s += result.wall_s
        return result


def _read_answer(output: bytes | None, nonce: str, result: Result) -> CaseFinding | tuple[str, str]:
    try:
        answer = sent_answer(result, output, nonce)
        if isinstance(answer, CaseFinding):
            return answer
        kind, text = answer
        if kind == "raised":
            return kind, json.dumps(error_words(text))
        read = read_tree(text)
        return FORGED if read is None else (kind, tree_text(read[0]))
    except Exception:  # noqa: BLE001 - all that is read here is the submission's
        return FORGED
