"""Issues of software repositories from SWE-bench and files of its shape.

The tasks hold the texts of the issue and its patches. A workflow that works on them needs a checkout of the repository at
`base_commit`, which no file of this kind contains.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from agentrl.data.source import DataRecord, read_records
from agentrl.types import Task


def swe_tasks(path: str | Sequence[str], *, start: int = 0, count: int | None = None) -> list[Task]:
    """Return the tasks of SWE-style files.

    Each task has `question` (the issue), `repo`, `base_commit`, `reference` (the patch that solves it), `test_patch`,
    `fail_to_pass` and `pass_to_pass` (names of tests), and `hints` and `version` where the file has them.

    Args:
        path: as for `read_records`.
        start: the first records are left out.
        count: number of records that are kept; None keeps all.

    Raises:
        ConfigError: a file or a record cannot be used, or no test shows that the issue is solved.
    """
    return [swe_task(record) for record in read_records(path, start=start, count=count)]


def swe_task(record: DataRecord) -> Task:
    """Return the task of a record of SWE-bench; `tasks.map` takes this function.

    Raises:
        ConfigError: the record cannot be used, or no test shows that the issue is solved.
    """
    must_pass = record.texts("FAIL_TO_PASS", "fail_to_pass")
    if not must_pass:
        raise record.error("'FAIL_TO_PASS': expected at least one test, which shows that the issue is solved")
    data: dict[str, Any] = {
        "question": record.text("problem_statement"),
        "repo": record.text("repo"),
        "base_commit": record.text("base_commit"),
        "reference": record.text("patch"),
        "test_patch": record.text("test_patch"),
        "fail_to_pass": must_pass,
        "pass_to_pass": record.texts("PASS_TO_PASS", "pass_to_pass"),
    }
    hints, version = record.optional("hints_text"), record.optional("version")
    data |= ({"hints": hints} if hints else {}) | ({"version": version} if version else {})
    return Task(id=f"swe-{record.text('instance_id')}", data=data)
