"""The programs of a grade: all of them go into a sandbox, and their results come out, by this file.

Invariant: a run that ends before its first line is an `EnvironmentFault`. All that happens after that line is the
submission's doing and has an outcome. Only an exit with status 0 can pass.
"""

from __future__ import annotations

import json
import secrets
import signal as signals
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cache, partial
from pathlib import Path
from typing import Final, NamedTuple, TypeAlias, TypeVar, cast

import anyio.to_thread

from agentrl.errors import EnvironmentFault
from agentrl.support.foreign import one_line, shortened
from agentrl_rewards.code.cases import CallCase, FunctionTests, ProgramTests, StdinCase
from agentrl_rewards.code.compare import kind_of, output_matches, read_tree, shown_value, value_matches
from agentrl_rewards.code.loose import apply_views, group_of
from agentrl_rewards.code.runner import READY_WIDTH, SOLUTION
from agentrl_rewards.code.values import encode_arguments, encode_value, tree_text
from agentrl_sandbox.types import Ending, Program, Result, signal_name

GRADER_FOLDER: Final = ".grader"
ENVIRONMENT: Final = {"PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1"}
"""A submission gets the same reward each time, also if it depends on the order of a set."""
_SHELL: Final = f'printf "%-{READY_WIDTH}s\\n" "$0" && exec python3 {SOLUTION}.py <{GRADER_FOLDER}/stdin'
MAX_DETAIL: Final = 400
_MAX_BYTES_AT_ONCE: Final = READY_WIDTH + 50_000
_Read = TypeVar("_Read")
RunProgram: TypeAlias = Callable[[Program], Awaitable[Result]]


class CaseOutcome(StrEnum):
    """The end of a submission in one test case. All but the first count as failed."""

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
FAILED_CASES: Final = {
    "error": CaseOutcome.RAISED,
    "raised": CaseOutcome.RAISED,
    "missing": CaseOutcome.MISSING_FUNCTION,
    "unsupported": CaseOutcome.UNSUPPORTED_VALUE,
}
_EARLY_ERRORS: Final = frozenset(
    {"SyntaxError", "IndentationError", "TabError", "NameError", "ImportError", "ModuleNotFoundError"}
)


class CaseFinding(NamedTuple):
    """The outcome of a run, with its details."""

    outcome: CaseOutcome
    detail: str = ""
    error: str | None = None
    returned: str | None = None

    def graded(self, wall_s: float) -> CaseGrade:
        detail = shortened(one_line(self.detail), MAX_DETAIL)
        return CaseGrade(outcome=self.outcome, detail=detail, error=self.error, wall_s=wall_s, returned=self.returned)


FORGED: Final = CaseFinding(CaseOutcome.FORGED_RESULT, "tampered with the channel of results")


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseGrade:
    """The outcome of one test case."""

    outcome: CaseOutcome
    detail: str = ""
    """Deeds of the submission, on one line. It never shows what was expected, but a submission can put its arguments there:
    show it only of tests that the policy may see."""
    error: str | None = None
    """The kind of a syntax, name or import error at import; a submission can choose other errors by its arguments."""
    wall_s: float = 0.0
    """Seconds that the sandbox ran."""
    returned: str | None = None
    """A wrong value, as Python shows it. It tells about the arguments: show it only of tests that the policy may see."""

    @property
    def passed(self) -> bool:
        """Whether the case counts."""
        return self.outcome is CaseOutcome.PASSED


class Job(NamedTuple):
    """A program, and the word by which its lines are known."""

    program: Program
    nonce: str


def make_job(command: tuple[str, ...], files: Mapping[str, bytes], job: Mapping[str, object]) -> Job:
    """Return a program that reads `job` from its standard input."""
    nonce = secrets.token_hex(16)
    text = json.dumps({"nonce": nonce, **job})
    return Job(Program(argv=command, files=files, stdin=text.encode(), environment=ENVIRONMENT), nonce)


def call_job(source: str, job: Mapping[str, object]) -> Job:
    """Return the program that calls a function of the submission `source`."""
    files = {f"{SOLUTION}.py": source.encode(errors="surrogatepass"), **grader_files("runner", "usual_names", "values")}
    return make_job(("python3", f"{GRADER_FOLDER}/runner.py"), files, job)


def _stdin_job(source: str, stdin: str) -> Job:
    nonce = secrets.token_hex(16)
    texts = {f"{SOLUTION}.py": source, f"{GRADER_FOLDER}/stdin": stdin}
    files = {name: text.encode(errors="surrogatepass") for name, text in texts.items()}
    [names] = grader_files("usual_names").values()
    files[f"{GRADER_FOLDER}/sitecustomize.py"] = names
    environment = {**ENVIRONMENT, "PYTHONPATH": GRADER_FOLDER}
    return Job(Program(argv=("/bin/sh", "-c", _SHELL, f"ready {nonce}"), files=files, environment=environment), nonce)


@cache
def grader_files(program: str, *modules: str) -> dict[str, bytes]:
    """Return a program of this folder, and the modules that it imports, at the paths where it finds them in the sandbox."""
    here = Path(__file__).parent
    imported = {f"{GRADER_FOLDER}/agentrl_rewards/code/{name}.py": (here / f"{name}.py").read_bytes() for name in modules}
    return {f"{GRADER_FOLDER}/{program}.py": (here / f"{program}.py").read_bytes(), **imported}


def output_after(nonce: str, result: Result) -> bytes | None:
    """Return the output after the first line, None if that line is not whole; EnvironmentFault if the run ended before."""
    ready = f"ready {nonce}".encode()
    first, newline, output = result.stdout.partition(b"\n")
    if not first.startswith(ready):
        raise EnvironmentFault(
            f"code grader: the sandbox ended before the submission began ({result.ended}, {result.wall_s:.1f} s): "
            f"{shortened(one_line(result.stderr.decode(errors='replace')), MAX_DETAIL)}"
        )
    return output if newline and first.rstrip() == ready else None


def failed_ending(result: Result) -> CaseFinding | None:
    """Return the outcome of a run that did not end with status 0."""
    if result.is_success:
        return None
    if result.ended in _LIMITS:
        return CaseFinding(_LIMITS[result.ended], f"reached the limit of {result.ended} after {result.wall_s:.1f} s")
    if result.signal == signals.SIGXCPU:
        return CaseFinding(CaseOutcome.TIMEOUT, "spent its CPU time")
    last_line = _last_line(result.stderr)
    if result.ended is Ending.KILLED:
        return CaseFinding(CaseOutcome.CRASHED, f"ended by {signal_name(result.signal)} {last_line}".rstrip())
    return CaseFinding(CaseOutcome.EXIT_STATUS, f"ended with status {result.exit_status} {last_line}".rstrip())


def sent_line(output: bytes | None, nonce: str) -> tuple[str, str] | None:
    """Return the kind and the text of the only line of an output, None if it is anything else."""
    words = (output or b"").split(b" ", 2)
    if len(words) != 3 or words[1] != nonce.encode() or words[2].find(b"\n") != len(words[2]) - 1:
        return None
    return words[0].decode(errors="replace"), words[2][:-1].decode(errors="replace")


def sent_answer(result: Result, output: bytes | None, nonce: str) -> tuple[str, str] | CaseFinding:
    """Return the end of a call, `value` or `raised`, and its text; otherwise the outcome without them."""
    if stopped := failed_ending(result):
        return stopped
    if output == b"":
        return CaseFinding(CaseOutcome.NO_RESULT, "ended before the function returned")
    kind, text = sent_line(output, nonce) or ("", "")
    if kind in ("value", "raised"):
        return kind, text
    return told_failure(kind, text) if kind in FAILED_CASES else FORGED


def told_failure(kind: str, text: str) -> CaseFinding:
    """Return the outcome of an error that the runner reported, or that a submission forged."""
    detail = error_text(text)
    return CaseFinding(FAILED_CASES[kind], detail, early_error(detail) if kind == "error" else None)


async def read_result(read: Callable[[Result], _Read], result: Result) -> _Read:
    """Return what `read` makes of a result; a large one is read in a thread, since that can take a second."""
    if len(result.stdout) <= _MAX_BYTES_AT_ONCE:
        return read(result)
    return await anyio.to_thread.run_sync(read, result)


async def grade_case(source: str, tests: FunctionTests | ProgramTests, index: int, run: RunProgram) -> CaseGrade:
    """Run the submission `source` through one case."""
    case = tests.cases[index]
    if isinstance(case, StdinCase):
        job = _stdin_job(source, case.stdin)
    else:
        assert isinstance(tests, FunctionTests)
        arguments, keywords = encode_arguments(list(case.arguments)), encode_arguments(dict(case.keywords))
        job = call_job(source, {"entry": tests.entry, "arguments": arguments, "keywords": keywords})
    return await read_result(partial(_graded, case, tests, job.nonce), await run(job.program))


def _graded(case: CallCase | StdinCase, tests: FunctionTests | ProgramTests, nonce: str, result: Result) -> CaseGrade:
    output = output_after(nonce, result)
    try:
        if isinstance(case, StdinCase):
            finding = failed_ending(result) or (FORGED if output is None else _compared(case, output, tests))
        else:
            finding = sent_answer(result, output, nonce)
            if not isinstance(finding, CaseFinding):
                kind, text = finding
                finding = _value_finding(case, text, tests) if kind == "value" else told_failure(kind, text)
    except Exception:  # noqa: BLE001 - all that is read here is the submission's
        finding = FORGED
    return finding.graded(result.wall_s)


def _compared(case: StdinCase, output: bytes, tests: FunctionTests | ProgramTests) -> CaseFinding:
    if output_matches(case.expected, output, tests.tolerance, tests.comparison):
        return CaseFinding(CaseOutcome.PASSED)
    return CaseFinding(CaseOutcome.WRONG_VALUE, f"wrote {output[: 2 * MAX_DETAIL].decode(errors='replace')!r}")


def _value_finding(case: CallCase, found: str, tests: FunctionTests | ProgramTests) -> CaseFinding:
    expected = encode_value(case.expected)
    tree = read_tree(found)
    if tree is None:
        return CaseFinding(CaseOutcome.FORGED_RESULT, "sent what is no value")
    seen = apply_views(case.views, tree[0]) if case.views else tree
    text = tree_text(seen[0]) if case.views and seen is not None else found
    if seen is not None and value_matches(expected, text, tests.tolerance, tests.comparison):
        return CaseFinding(CaseOutcome.PASSED)
    kind, returned = kind_of(tree[0]), shown_value(found, MAX_DETAIL)
    group = group_of if tests.comparison == "python" else kind_of
    if not case.views and group(tree[0]) != group(json.loads(expected)):
        return CaseFinding(CaseOutcome.WRONG_TYPE, f"returned a value of type {kind}", returned=returned)
    return CaseFinding(CaseOutcome.WRONG_VALUE, f"returned another value of type {kind}", returned=returned)


def error_words(text: str) -> tuple[str, str, int | None]:
    """Return the name, message and line of an error that the runner reported, or that a submission forged."""
    try:
        name, message, line = cast("list[object]", json.loads(text))
    except (ValueError, RecursionError, TypeError):
        return "", "", None
    return str(name), str(message), line if isinstance(line, int) else None


def error_text(text: str) -> str:
    """Return such an error on one line; nothing for a text that is none."""
    name, message, line = error_words(text)
    shown = f"{name}: {message}" if name or message else ""
    return shown + (f" (line {line})" if line is not None else "")


def early_error(told: str) -> str | None:
    """Return the kind of an error at import if the text of a program alone can cause it, such as a SyntaxError."""
    name = told.partition(":")[0]
    return name if name in _EARLY_ERRORS else None


def _last_line(output: bytes) -> str:
    lines = output[-4 * MAX_DETAIL :].decode(errors="replace").strip().splitlines()
    return f"({lines[-1]})" if lines else ""
