"""One test function of a test file: its calls travel to the submission, and the answers back, between sandboxes.

Invariant: the submission and the test run in different sandboxes, and only plain values and names of exceptions travel from
one to the other. So a submission cannot touch an assertion; it can only give other answers.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Awaitable, Callable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Final, cast

from agentrl.errors import EnvironmentFault
from agentrl.foreign import one_line, shortened
from agentrl.reward.code.compare import read_tree
from agentrl.reward.code.module_program import TEST_FILE
from agentrl.reward.code.module_tests import ModuleTests
from agentrl.reward.code.protocol import (
    ENVIRONMENT,
    FOLDER,
    FORGED,
    KINDS,
    MAX_DETAIL,
    CaseGrade,
    CaseOutcome,
    early_error,
    error_text,
    failed_ending,
    output_after,
    read_result,
    runner_files,
    sent_line,
)
from agentrl.reward.code.runner import SOLUTION
from agentrl.reward.code.values import tree_text
from agentrl.sandbox.types import Program, Result

MAX_CALLS: Final = 100
"""Calls of the submission by one test function; each is a run of two sandboxes."""
_SUBMISSION_COMMAND: Final = ("python3", f"{FOLDER}/runner.py")
_TEST_COMMAND: Final = ("/bin/sh", "-c", f"exec python3 {FOLDER}/module_program.py")
"""By a shell, so that a warm interpreter, in which submissions have run, never runs a test: it passes on all but Python."""
MAX_ANSWER_CHARS: Final = 4_000_000
"""Text of all answers in one test function."""


class ModuleTestRun:
    """One test function of one submission."""

    def __init__(self, source: str, tests: ModuleTests, index: int, run: Callable[[Program], Awaitable[Result]]) -> None:
        """Prepare the test function `index`; `run` runs a program in a fresh sandbox."""
        self._source, self._tests, self._test, self._run = source, tests, tests.cases[index], run
        self._wall_s = 0.0

    async def grade(self) -> CaseGrade:
        """Run the test, and the submission for each call in it.

        Raises:
            EnvironmentFault: a sandbox failed, or the test fails or ends before it has asked the submission for anything.

        Cancellation: the program that runs is ended.
        """
        calls: list[list[str]] = []
        answers: list[list[str]] = []
        while True:
            step = await self._next_call(answers)
            if isinstance(step, CaseGrade):
                return step
            if len(calls) == MAX_CALLS:
                return self._graded(CaseOutcome.TIMEOUT, f"called more than {MAX_CALLS} times in one test")
            calls.append(cast("list[str]", json.loads(step)))
            answer = await self._answer(calls)
            if isinstance(answer, CaseGrade):
                return answer
            answers.append([step, *answer])
            if sum(len(text) for _, _, text in answers) > MAX_ANSWER_CHARS:
                return self._graded(CaseOutcome.OUTPUT, f"returned more than {MAX_ANSWER_CHARS} characters in one test")

    async def _next_call(self, answers: list[list[str]]) -> CaseGrade | str:
        """Run the test with these answers; return its next call, or its end."""
        job = {"module": self._tests.module, "test": self._test, "answers": answers}
        files = {f"{FOLDER}/{TEST_FILE}.py": self._tests.source.encode(errors="surrogatepass")} | _test_files()
        result, output, nonce = await self._result(_TEST_COMMAND, files, job)
        line = sent_line(output or b"", nonce)
        stopped = failed_ending(result)
        if stopped is None and line is not None and line[0] == "call":
            return line[1]
        told = stopped[1] if stopped else " ".join(line or ("it sent nothing",))
        if not answers or (line is not None and line[0] in ("unsupported", "changed")):
            raise EnvironmentFault(
                f"tests: expected {self._test} to call the submission with plain values, the same ones each time, and to "
                f"end only after that, got: {shortened(one_line(told), MAX_DETAIL)}; correct the test file"
            )
        if stopped:
            return self._graded(stopped[0], f"the test {stopped[1]}")
        if line is None:
            return self._graded(CaseOutcome.NO_RESULT, "the test ended its process")
        name = str(cast("list[object]", json.loads(line[1]))[0])
        if line[0] == "passed":
            return self._graded(CaseOutcome.PASSED, "")
        if line[0] == "raised":
            detail = error_text(answers[-1][2])
            return self._graded(CaseOutcome.RAISED, detail)
        detail = "failed an assertion" if name == "AssertionError" else f"{name} in the test"
        return self._graded(CaseOutcome.WRONG_VALUE, detail)

    async def _answer(self, calls: list[list[str]]) -> CaseGrade | tuple[str, str]:
        """Run the submission through these calls; return the kind and text of its last answer, or why it has none."""
        *earlier, (entry, arguments, keywords) = calls
        job = {"entry": entry, "arguments": arguments, "keywords": keywords, "earlier": earlier, "in_order": True}
        files = {f"{SOLUTION}.py": self._source.encode(errors="surrogatepass")} | runner_files()
        result, output, nonce = await self._result(_SUBMISSION_COMMAND, files, job)
        return await read_result(partial(self._read_answer, output, nonce), result)

    def _read_answer(self, output: bytes | None, nonce: str, result: Result) -> CaseGrade | tuple[str, str]:
        try:
            return self._answer_in(output, nonce, result)
        except Exception:  # noqa: BLE001 - all that is read here is the submission's
            return self._graded(*FORGED)

    def _answer_in(self, output: bytes | None, nonce: str, result: Result) -> CaseGrade | tuple[str, str]:
        if stopped := failed_ending(result):
            return self._graded(*stopped)
        if output == b"":
            return self._graded(CaseOutcome.NO_RESULT, "ended before the function returned")
        line = sent_line(output or b"", nonce)
        if line is None:
            return self._graded(*FORGED)
        kind, text = line
        if kind == "raised":
            return kind, json.dumps(_error_words(text))
        if kind in KINDS:
            detail = error_text(text)
            return self._graded(KINDS[kind], detail, early_error(detail) if kind == "error" else None)
        read = read_tree(text) if kind == "value" else None
        return self._graded(*FORGED) if read is None else ("value", tree_text(read[0]))

    async def _result(
        self, command: tuple[str, ...], files: Mapping[str, bytes], job: Mapping[str, object]
    ) -> tuple[Result, bytes | None, str]:
        nonce = secrets.token_hex(16)
        program = Program(
            argv=command,
            files=files,
            stdin=json.dumps({"nonce": nonce, **job}).encode(),
            environment=ENVIRONMENT,
        )
        result = await self._run(program)
        self._wall_s += result.wall_s
        return result, output_after(f"ready {nonce}".encode(), result), nonce

    def _graded(self, outcome: CaseOutcome, detail: str, error: str | None = None) -> CaseGrade:
        return CaseGrade(outcome=outcome, detail=shortened(one_line(detail), MAX_DETAIL), error=error, wall_s=self._wall_s)


def _error_words(text: str) -> list[str | int | None]:
    """Return the name, message and line of an error that the runner reported, or that a submission forged."""
    try:
        name, message, line = cast("list[object]", json.loads(text))
    except (ValueError, RecursionError, TypeError):
        return ["", "", None]
    return [str(name), str(message), line if isinstance(line, int) else None]


@cache
def _test_files() -> dict[str, bytes]:
    here = Path(__file__).parent
    return {
        f"{FOLDER}/module_program.py": (here / "module_program.py").read_bytes(),
        f"{FOLDER}/agentrl/reward/code/runner.py": (here / "runner.py").read_bytes(),
        f"{FOLDER}/agentrl/reward/code/values.py": (here / "values.py").read_bytes(),
    }
