"""The hidden tests of a project: each call runs in a sandbox of its own, after the last edit, and is compared outside.

Invariant: no file of the project takes the place of one of the grader's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from agentrl.types import Task
from agentrl_rewards.code import CodeGrade, CodeGrader, call_tests
from agentrl_rewards.code.grader import ProgramRunner
from agentrl_sandbox import Limits, Program, Result
from agentrl_workflows.command import TASK_FILE, Work
from agentrl_workflows.repositories.tasks import MAX_PROJECT_CHARS, MAX_PROJECT_FILES, check_path


async def hidden_tests(text: str, task: Task, work: Work) -> float:
    """Return 1.0 if the files that a program left pass all hidden tests of a repository task, else 0.0.

    A grader for `workflow.grader`. Files with names that no project may have, such as the notes of a coding CLI in
    `.codex`, are left out; of too many files those of the task count.
    """
    del text
    grade = await grade_project(task, _project_files(work.files, task["files"]), work.sandbox)
    return grade.reward


async def grade_project(
    task: Task, files: Mapping[str, bytes], sandbox: ProgramRunner, *, partial_credit: bool = False
) -> CodeGrade:
    """Return how the files of a project do in the hidden tests of their task, `task["driver"]` and `task["calls"]`."""
    grader = CodeGrader(_BesideProject(sandbox, files), extract=str, partial_credit=partial_credit)
    return await grader.grade(task["driver"], call_tests([(call, value) for call, value in task["calls"]]))


def _project_files(left: Mapping[str, bytes], given: Mapping[str, str]) -> dict[str, bytes]:
    found = {path: data for path, data in left.items() if path != TASK_FILE and _is_of_project(path)}
    if len(found) <= MAX_PROJECT_FILES and sum(map(len, found.values())) <= MAX_PROJECT_CHARS:
        return found
    return {path: data for path, data in found.items() if path in given and len(data) <= MAX_PROJECT_CHARS}


def _is_of_project(path: str) -> bool:
    try:
        check_path(path)
    except ValueError:
        return False
    return "__pycache__" not in path.split("/")


class _BesideProject:
    """Runs the programs of the grader beside the files of a project, which replace none of the grader's."""

    def __init__(self, sandbox: ProgramRunner, files: Mapping[str, bytes]) -> None:
        self._sandbox, self._files = sandbox, files

    async def run(self, program: Program, limits: Limits | None = None) -> Result:
        return await self._sandbox.run(replace(program, files={**self._files, **program.files}), limits)
