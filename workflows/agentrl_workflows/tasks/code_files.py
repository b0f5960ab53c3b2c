"""Programming problems with hidden tests from the files of MBPP, HumanEval and LiveCodeBench.

Every task has `question`, `tests` (hidden; for `agentrl_rewards.code.read_tests`) and, where the file has them, `examples`
(tests that the policy may see) and `reference` (a response that is right).

Invariant: nothing of a file is executed or unpickled here; tests become data. A record whose tests cannot become data is an
error that names it; with `skip_unreadable` it is left out, and the log has the number of such records.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, cast

from agentrl.data.source import DataRecord, read_records
from agentrl.errors import ConfigError
from agentrl.support.exact_json import decode_exact_json
from agentrl.types import JsonValue, Task
from agentrl_rewards.code import read_tests
from agentrl_workflows.tasks.assertions import asserted_calls, checked_calls
from agentrl_workflows.tasks.check_files import check_file

logger = logging.getLogger(__name__)

_FUNCTION: Final = "Answer with the whole function in one block of Python code."
_PROGRAM: Final = (
    "Write a Python program that reads standard input and writes the answer to standard output. Answer with the whole "
    "program in one block of Python code."
)


def mbpp_tasks(
    path: str | Sequence[str], *, start: int = 0, count: int | None = None, skip_unreadable: bool = False
) -> list[Task]:
    """Return the tasks of MBPP files: `task_id`, `text` (`prompt` in the sanitized files), `code` and `test_list`.

    The policy sees the first assertion, which names the function; the others and `challenge_test_list` are hidden.

    Args:
        path: as for `read_records`.
        start: the first records are left out.
        count: number of records that are read; None reads all.
        skip_unreadable: leave out records with tests that are no calls with constant values, such as `f(g(1)) == ...`.

    Raises:
        ConfigError: a file or a record cannot be used.
    """
    return _code_tasks("mbpp", read_records(path, start=start, count=count), mbpp_task, skip_unreadable)


def mbpp_task(record: DataRecord) -> Task:
    """Return the task of a record of MBPP; `tasks.map` takes this function.

    Raises:
        ConfigError: the record cannot be used.
    """
    asserts = record.texts("test_list")
    more = record.texts("challenge_test_list") if record.optional("challenge_test_list") is not None else []
    if not asserts:
        raise record.error("'test_list': expected at least one assertion")
    hidden = [*asserts[1:], *more] or asserts
    question = f"{record.text('text', 'prompt').strip()}\n\nExample: `{asserts[0].strip()}`\n\n{_FUNCTION}"
    data = {
        "question": question,
        "examples": asserted_calls(asserts[:1]),
        "tests": asserted_calls(hidden),
        "reference": _block(record.text("code")),
    }
    return _code_task(f"mbpp-{record.answer('task_id')}", data)


def humaneval_tasks(
    path: str | Sequence[str], *, start: int = 0, count: int | None = None, skip_unreadable: bool = False
) -> list[Task]:
    """Return the tasks of HumanEval files: `task_id`, `prompt`, `entry_point`, `canonical_solution` and `test`.

    Args:
        path: as for `read_records`; the published `.jsonl.gz` is read as it is.
        start: the first records are left out.
        count: number of records that are read; None reads all.
        skip_unreadable: leave out records whose `check` is neither calls with constant values nor a supported test file.

    Raises:
        ConfigError: a file or a record cannot be used.
    """
    return _code_tasks("humaneval", read_records(path, start=start, count=count), humaneval_task, skip_unreadable)


def humaneval_task(record: DataRecord) -> Task:
    """Return the task of a record of HumanEval; `tasks.map` takes this function.

    Raises:
        ConfigError: the record cannot be used.
    """
    prompt, entry = record.text("prompt"), record.text("entry_point")
    try:
        tests = checked_calls(record.text("test"), entry)
    except ConfigError:  # loops, random inputs, and values that are computed
        tests = check_file(record.text("test"), entry, prompt)
    question = f"Complete the function `{entry}`:\n\n{_block(prompt)}\n\n{_FUNCTION} Repeat the imports that it needs."
    reference = _block(prompt + record.text("canonical_solution"))
    data = {"question": question, "tests": tests, "reference": reference}
    return _code_task(f"humaneval-{record.text('task_id')}", data)


def livecodebench_tasks(
    path: str | Sequence[str],
    *,
    start: int = 0,
    count: int | None = None,
    private_tests: bool = True,
    skip_unreadable: bool = False,
) -> list[Task]:
    """Return the tasks of LiveCodeBench files; they have no `reference`.

    The fields are `question_id`, `question_content`, `starter_code`, `public_test_cases`, `private_test_cases` and, for
    tests that call a function, `metadata` with its `func_name`.

    Args:
        path: as for `read_records`.
        start: the first records are left out.
        count: number of records that are read; None reads all.
        private_tests: whether the tests include the private ones. Published files have them as compressed pickle, which is
            refused: `python -m agentrl_workflows.tasks.private_tests` converts such a file in the sandbox.
        skip_unreadable: leave out records with tests that are neither runs of a program nor calls with JSON values.

    Raises:
        ConfigError: a file or a record cannot be used.
    """
    make = partial(livecodebench_task, private_tests=private_tests)
    return _code_tasks("livecodebench", read_records(path, start=start, count=count), make, skip_unreadable)


def livecodebench_task(record: DataRecord, *, private_tests: bool = True) -> Task:
    """Return the task of a record of LiveCodeBench; `tasks.map` takes this function.

    Raises:
        ConfigError: the record cannot be used.
    """
    public = record.listed("public_test_cases")
    cases = [*public, *_private_cases(record)] if private_tests else public
    starter = record.optional("starter_code")
    question = record.text("question_content").strip()
    tests, instruction = _judged(record, cases)
    if isinstance(starter, str) and starter.strip():
        question += f"\n\nComplete this code:\n\n{_block(starter)}"
    data: dict[str, Any] = {"question": f"{question}\n\n{instruction}", "tests": tests}
    data |= {"examples": _judged(record, public)[0]} if public else {}
    data |= {name: value for name in ("difficulty", "platform") if (value := record.optional(name)) is not None}
    return _code_task(f"livecodebench-{record.answer('question_id')}", data)


def _code_task(name: str, data: dict[str, Any]) -> Task:
    read_tests(data["tests"])
    return Task(id=name, data=data)


def _code_tasks(
    kind: str, records: Sequence[DataRecord], make: Callable[[DataRecord], Task], skip_unreadable: bool
) -> list[Task]:
    tasks: list[Task] = []
    skipped: list[str] = []
    for record in records:
        try:
            task = make(record)
        except ConfigError as error:
            text = str(error)
            problem = error if text.startswith(record.place) else record.error(text)
            if not skip_unreadable or problem is error:  # a missing field is always an error
                hint = "" if problem is error else ", or leave out such records with skip_unreadable: true"
                raise ConfigError(f"{problem}{hint}") from None
            skipped.append(f"{record.place}: {text}")
        else:
            tasks.append(task)
    if skipped:
        logger.warning("%s: left out %d of %d records; the first: %s", kind, len(skipped), len(records), skipped[0])
    if not tasks:
        raise ConfigError(f"{kind}: none of {len(records)} records has tests that can be used; the first: {skipped[0]}")
    return tasks


def _private_cases(record: DataRecord) -> list[object]:
    written = record.value("private_test_cases", kind="tests")
    if isinstance(written, str) and not written.lstrip().startswith("["):
        raise record.error(
            "'private_test_cases' is compressed pickle, which can run any code when it is read. agentrl never unpickles: "
            "convert the file in the sandbox: python -m agentrl_workflows.tasks.private_tests FILE NEW_FILE; or set "
            "private_tests: false"
        )
    return record.listed("private_test_cases")


def _judged(record: DataRecord, cases: Sequence[object]) -> tuple[dict[str, JsonValue], str]:
    """Return the tests of LiveCodeBench cases, and what the policy should write."""
    pairs: list[tuple[str, str]] = []
    kinds: set[str] = set()
    for case in cases:
        found = cast("dict[str, object]", case) if isinstance(case, dict) else {}
        given, expected = found.get("input"), found.get("output")
        if not (isinstance(given, str) and isinstance(expected, str)):
            raise record.error(f"a test case needs the texts 'input' and 'output', got {case!r:.100}")
        pairs.append((given, expected))
        kinds.add(str(found.get("testtype", "stdin")))
    if kinds == {"stdin"}:
        return {"runs": [list(pair) for pair in pairs], "comparison": "python"}, _PROGRAM
    if kinds != {"functional"}:
        raise record.error(f"expected test cases of the testtype stdin or functional, got {sorted(kinds) or 'none'}")
    name = _function_name(record)
    calls: list[JsonValue] = [_json_call(name, given, expected) for given, expected in pairs]
    return {"calls": calls, "comparison": "python"}, (
        "Answer with the whole class in one block of Python code. Repeat the imports that it needs."
    )


def _function_name(record: DataRecord) -> str:
    metadata = record.value("metadata", kind="the name of the function")
    try:
        found = decode_exact_json(metadata) if isinstance(metadata, str) else metadata
    except ValueError as error:
        raise record.error(f"'metadata': expected JSON: {error}") from None
    name = cast("dict[str, object]", found).get("func_name") if isinstance(found, dict) else None
    if not (isinstance(name, str) and name.isidentifier()):
        raise record.error(f"'metadata': expected the name of a function as 'func_name', got {metadata!r:.80}")
    return f"Solution.{name}"


def _json_call(name: str, given: str, expected: str) -> list[JsonValue]:
    """Return a call with arguments that are one JSON value a line, and its value, in Python."""
    try:
        arguments = [decode_exact_json(line) for line in given.splitlines() if line.strip()]
        value = decode_exact_json(expected)
    except ValueError as error:
        raise ConfigError(f"the test case {given!r:.80} -> {expected!r:.80} is not JSON: {error}") from None
    return [f"{name}({', '.join(map(repr, arguments))})", repr(value)]


def _block(code: str) -> str:
    body = code.replace("\r\n", "\n").strip("\n")
    return f"```python\n{body}\n```"
