"""Submissions to graders of code, kept in text files: a line `=== name: outcomes` before each."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from agentrl.support.concurrency import task_group
from agentrl_rewards.code import CodeGrade, CodeGrader, HiddenTests, ProgramTests, StdinCase, call_tests

_EXPECT = re.compile(r"^# expect: (.+) => (.+)$", re.MULTILINE)
_TOLERANCE = re.compile(r"^# tolerance: (.+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """A named source, and the outcomes of which every case has one."""

    name: str
    source: str
    outcomes: frozenset[str]

    @property
    def response(self) -> str:
        """What a model would have written."""
        return f"Here it is:\n```python\n{self.source}```\n"

    def tests(self, default: HiddenTests) -> HiddenTests:
        """Return the tests that the source brings along, or else the default ones."""
        pairs = _EXPECT.findall(self.source)
        if not pairs:
            return default
        found = _TOLERANCE.search(self.source)
        tolerance = float(found[1]) if found else None
        if isinstance(default, ProgramTests):
            texts = [(ast.literal_eval(given), ast.literal_eval(text)) for given, text in pairs]
            return ProgramTests(cases=tuple(StdinCase(stdin=a, expected=b) for a, b in texts), tolerance=tolerance)
        return call_tests(pairs, tolerance=tolerance)


def read_submissions(file: Path) -> list[Submission]:
    """Return the submissions of a file."""
    found: list[Submission] = []
    for part in re.split(r"^=== ", file.read_text(), flags=re.MULTILINE)[1:]:
        title, _, source = part.partition("\n")
        name, _, outcomes = title.partition(": ")
        found.append(Submission(name=name, source=source, outcomes=frozenset(outcomes.split(", ") if outcomes else ())))
    assert len({each.name for each in found}) == len(found)
    return found


async def grade_all(grader: CodeGrader, submissions: Sequence[Submission], tests: HiddenTests) -> dict[str, CodeGrade]:
    """Return the grades of all submissions by their names; they run side by side."""
    grades: dict[str, CodeGrade] = {}

    async def grade(each: Submission) -> None:
        grades[each.name] = await grader.grade(each.response, each.tests(tests))

    async with task_group() as tasks:
        for each in submissions:
            tasks.start_soon(grade, each)
    return grades
