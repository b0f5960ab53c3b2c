"""One test case in the sandbox: the program that goes in, and what its result means.

Invariant: a run that ends before its first line was not the submission's doing and is an `EnvironmentFault`. Whatever
happens after that line is the submission's doing and has an outcome. Only an exit with status 0 can pass.
"""

from __future__ import annotations

import json
import secrets
import signal as signals
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Final, TypeVar, cast

import anyio.to_thread

from agentrl.errors import EnvironmentFault
from agentrl.foreign import one_line, shortened
from agentrl.reward.code.cases import CallCase, FunctionTests, ProgramTests, StdinCase
from agentrl.reward.code.compare import kind_of, output_matches, read_tree, shown_value, value_matches
from agentrl.reward.code.loose import apply_views, group_of
from agentrl.reward.code.runner import READY_WIDTH, SOLUTION
from agentrl.reward.code.values import encode_arguments, encode_value, tree_text
from agentrl.sandbox.types import Ending, Program, Result, signal_name

FOLDER: Final = ".grader"
ENVIRONMENT: Final = {"PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1"}
"""A submission gets the same reward each time, also if it depends on the order of a set."""
_SHELL: Final = f'printf "%-{READY_WIDTH}s\\n" "$0" && exec python3 {SOLUTION}.py <{FOLDER}/stdin'
MAX_DETAIL: Final = 400
_MAX_BYTES_AT_ONCE: Final = READY_WIDTH + 50_000
_Read = TypeVar("_Read")


class CaseOutcome(StrEnum):
    """What became of a submission in one test case. All but the first count as failed."""

    PASSED = "passed"
    WRONG_VALUE = "wrong_value"
    """Another value of the expected type, or another output."""
    WRONG_TYPE = "wrong_type"
    """A value of another type."""
    UNSUPPORTED_VALUE = "unsupported_value"
    """Something that is no plain data, such as a generator or an object of a class."""
    RAISED = "raised"
    """It raised, or called `sys.exit`; a syntax error too."""
    MISSING_FUNCTION = "missing_function"
    NO_RESULT = "no_result"
    """It ended its process before the function returned."""
    FORGED_RESULT = "forged_result"
    """It wrote to the channel of results."""
    EXIT_STATUS = "exit_status"
    """It ended with another status than 0."""
    CRASHED = "crashed"
    """A signal ended it."""
    TIMEOUT = "timeout"
    """It reached the limit of CPU or wall time."""
    MEMORY = "memory"
    OUTPUT = "output"
    FILES = "files"
    NO_CODE = "no_code"
    """The response has no code, or too much; nothing was run."""
    NOT_RUN = "not_run"
    """It reached the time limit in too many cases before."""


_LIMITS: Final = {
    Ending.TIMEOUT: CaseOutcome.TIMEOUT,
    Ending.MEMORY: CaseOutcome.MEMORY,
    Ending.OUTPUT: CaseOutcome.OUTPUT,
    Ending.FILES: CaseOutcome.FILES,
}
FORGED: Final = CaseOutcome.FORGED_RESULT, "tampered with the channel of results"
KINDS: Final = {
    "error": CaseOutcome.RAISED,
    "raised": CaseOutcome.RAISED,
    "missing": CaseOutcome.MISSING_FUNCTION,
    "unsupported": CaseOutcome.UNSUPPORTED_VALUE,
}
_EARLY_ERRORS: Final = frozenset(
    {"SyntaxError", "IndentationError", "TabError", "NameError", "ImportError", "ModuleNotFoundError"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseGrade:
    """The outcome of one test case."""

    outcome: CaseOutcome
    detail: str = ""
    """What the submission did, on one line. It never shows what was expected, but a submission can put its arguments there:
    show it only of tests that the policy may see."""
    error: str | None = None
    """The kind of a syntax, name or import error at import. Other errors have no kind here: a submission can choose one of
    them by its arguments."""
    wall_s: float = 0.0
    """Seconds that the sandbox ran."""
    returned: str | None = None
    """A wrong value, as Python shows it. It tells about the arguments: show it only of tests that the policy may see."""

    @property
    def passed(self) -> bool:
        """Whether the case counts."""
        return self.outcome is CaseOutcome.PASSED


def output_after(ready: bytes, result: Result) -> bytes | None:
    """Return the output after the first line, None if that line is not whole.

    Raises:
        EnvironmentFault: the run ended before the submission could begin.
    """
    first, newline, output = result.stdout.partition(b"\n")
    if not first.startswith(ready):
        raise EnvironmentFault(
            f"code grader: the sandbox ended before the submission began ({result.ended}, {result.wall_s:.1f} s): "
            f"{shortened(one_line(result.stderr.decode(errors='replace')), MAX_DETAIL)}"
        )
    return output if newline and first.rstrip() == ready else None


def failed_ending(result: Result) -> tuple[CaseOutcome, str] | None:
    """Return the outcome of a run that did not end with status 0."""
    if result.is_success:
        return None
    if result.ended in _LIMITS:
        return _LIMITS[result.ended], f"reached the limit of {result.ended} after {result.wall_s:.1f} s"
    if result.signal == signals.SIGXCPU:
        return CaseOutcome.TIMEOUT, "spent its CPU time"
    said = _last_line(result.stderr)
    if result.ended is Ending.KILLED:
        return CaseOutcome.CRASHED, f"ended by {signal_name(result.signal)} {said}".rstrip()
    return CaseOutcome.EXIT_STATUS, f"ended with status {result.exit_status} {said}".rstrip()


def sent_line(output: bytes, nonce: str) -> tuple[str, str] | None:
    """Return the kind and the text of the only line of an output, None if it is anything else."""
    words = output.split(b" ", 2)
    if len(words) != 3 or words[1] != nonce.encode() or words[2].find(b"\n") != len(words[2]) - 1:
        return None
    return words[0].decode(errors="replace"), words[2][:-1].decode(errors="replace")


async def read_result(read: Callable[[Result], _Read], result: Result) -> _Read:
    """Return what `read` makes of a result; it reads a large one in a thread, since that can take a second."""
    if len(result.stdout) <= _MAX_BYTES_AT_ONCE:
        return read(result)
    return await anyio.to_thread.run_sync(read, result)


class CaseRun:
    """One test case of one submission: `program` goes into a sandbox, `read` grades its result."""

    def __init__(self, source: str, tests: FunctionTests | ProgramTests, index: int) -> None:
        """Prepare case `index` of `tests`."""
        self._tests, self._index = tests, index
        self._nonce = secrets.token_hex(16)
        self._ready = f"ready {self._nonce}".encode()
        self.program = self._program(source.encode(errors="surrogatepass"))

    def _program(self, source: bytes) -> Program:
        case = self._tests.cases[self._index]
        files = {f"{SOLUTION}.py": source}
        if isinstance(case, StdinCase):
            files[f"{FOLDER}/stdin"] = case.stdin.encode(errors="surrogatepass")
            command = ("/bin/sh", "-c", _SHELL, self._ready.decode())
            return Program(argv=command, files=files, environment=ENVIRONMENT)
        assert isinstance(self._tests, FunctionTests)
        job = {
            "nonce": self._nonce,
            "entry": self._tests.entry,
            "arguments": encode_arguments(list(case.arguments)),
            "keywords": encode_arguments(dict(case.keywords)),
        }
        return Program(
            argv=("python3", f"{FOLDER}/runner.py"),
            files=files | runner_files(),
            stdin=json.dumps(job).encode(),
            environment=ENVIRONMENT,
        )

    def read(self, result: Result) -> CaseGrade:
        """Return the grade.

        Raises:
            EnvironmentFault: the run ended before the submission could begin.
        """
        output = output_after(self._ready, result)
        try:
            return self._graded(result, output)
        except Exception:  # noqa: BLE001 - all that is read from here on is the submission's
            return CaseGrade(outcome=FORGED[0], detail=FORGED[1], wall_s=result.wall_s)

    def _graded(self, result: Result, output: bytes | None) -> CaseGrade:
        case = self._tests.cases[self._index]
        outcome, detail = failed_ending(result) or (FORGED if output is None else self._compared(case, output))
        detail = shortened(one_line(detail), MAX_DETAIL)
        kind, text = (sent_line(output or b"", self._nonce) if isinstance(case, CallCase) else None) or ("", "")
        is_value = outcome in (CaseOutcome.WRONG_VALUE, CaseOutcome.WRONG_TYPE)
        returned = shown_value(text, MAX_DETAIL) if is_value and kind == "value" else None
        error = early_error(detail) if outcome is CaseOutcome.RAISED and kind == "error" else None
        return CaseGrade(outcome=outcome, detail=detail, error=error, wall_s=result.wall_s, returned=returned)

    def _compared(self, case: CallCase | StdinCase, output: bytes) -> tuple[CaseOutcome, str]:
        tests = self._tests
        if isinstance(case, StdinCase):
            if output_matches(case.expected, output, tests.tolerance, tests.comparison):
                return CaseOutcome.PASSED, ""
            return CaseOutcome.WRONG_VALUE, f"wrote {output[: 2 * MAX_DETAIL].decode(errors='replace')!r}"
        if not output:
            return CaseOutcome.NO_RESULT, "ended before the function returned"
        line = sent_line(output, self._nonce)
        if line is None:
            return FORGED
        kind, text = line
        if kind in KINDS:
            return KINDS[kind], error_text(text)
        if kind != "value":
            return FORGED
        return _value_outcome(case, text, tests)


def _value_outcome(case: CallCase, found: str, tests: FunctionTests | ProgramTests) -> tuple[CaseOutcome, str]:
    expected = encode_value(case.expected)
    tree = read_tree(found)
    if tree is None:
        return CaseOutcome.FORGED_RESULT, "sent what is no value"
    seen = apply_views(case.views, tree[0]) if case.views else tree
    text = tree_text(seen[0]) if case.views and seen is not None else found
    if seen is not None and value_matches(expected, text, tests.tolerance, tests.comparison):
        return CaseOutcome.PASSED, ""
    kind = kind_of(tree[0])
    group = group_of if tests.comparison == "python" else kind_of
    if not case.views and group(tree[0]) != group(json.loads(expected)):
        return CaseOutcome.WRONG_TYPE, f"returned a value of type {kind}"
    return CaseOutcome.WRONG_VALUE, f"returned another value of type {kind}"


def error_text(text: str) -> str:
    """Return the error that the runner reported, or that a submission forged."""
    try:
        name, message, line = cast("list[object]", json.loads(text))
    except (ValueError, RecursionError, TypeError):
        return ""
    return f"{name}: {message}" + (f" (line {line})" if isinstance(line, int) else "")


def early_error(told: str) -> str | None:
    """Return the kind of an error at import if the text of a program alone can cause it.

    Example:
        >>> early_error("SyntaxError: invalid syntax (line 3)"), early_error("KeyError: 3"), early_error("Args_3_4: ")
        ('SyntaxError', None, None)
    """
    name = told.partition(":")[0]
    return name if name in _EARLY_ERRORS else None


def _last_line(output: bytes) -> str:
    lines = output[-4 * MAX_DETAIL :].decode(errors="replace").strip().splitlines()
    return f"({lines[-1]})" if lines else ""


@cache
def runner_files() -> dict[str, bytes]:
    """Return the runner, and the module that it imports, at the paths where it finds them in the sandbox."""
    here = Path(__file__).parent
    return {
        f"{FOLDER}/runner.py": (here / "runner.py").read_bytes(),
        f"{FOLDER}/agentrl/reward/code/values.py": (here / "values.py").read_bytes(),
    }
