"""Repository tasks: a project, an issue, hidden tests, and the patch that solves the issue.

Invariant: the hidden tests are calls of the function `check` in the task's own driver, which is never part of the project.
The reference patch passes all of them, and the project without it does not (`tests/workflows/bundled/test_repository.py`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Final

import msgspec

from agentrl.config import load_yaml
from agentrl.errors import ConfigError
from agentrl.types import Task

MAX_PROJECT_FILES: Final = 200
MAX_PROJECT_CHARS: Final = 2_000_000
_MAX_PATH_BYTES: Final = 200
_RESERVED: Final = "solution"
"""The grader's name for the driver."""


class Edit(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One exact replacement."""

    path: str
    old: str
    new: str

    def applied(self, files: Mapping[str, str]) -> dict[str, str]:
        """Return the files with the replacement; an empty `old` makes a new file.

        Raises:
            ValueError: the path cannot be used, `old` is not there exactly once, or a limit is passed.

        Example:
            >>> Edit(path="a.py", old="1", new="2").applied({"a.py": "x = 1"})
            {'a.py': 'x = 2'}
        """
        check_path(self.path)
        if self.old == "":
            if self.path in files:
                raise ValueError(f"{self.path} is there already; give the text to replace as `old`")
            if any(f"{path}/".startswith(f"{self.path}/") or self.path.startswith(f"{path}/") for path in files):
                raise ValueError(f"{self.path} cannot be a file and a folder")
            text = self.new
        elif self.path not in files:
            raise ValueError(f"there is no file {self.path}; an empty `old` makes a new one")
        else:
            count = files[self.path].count(self.old)
            if count != 1:
                raise ValueError(f"`old` must be in {self.path} exactly once, but it is there {count} times")
            text = files[self.path].replace(self.old, self.new)
        edited = {**files, self.path: text}
        if len(edited) > MAX_PROJECT_FILES or sum(map(len, edited.values())) > MAX_PROJECT_CHARS:
            raise ValueError(f"a project has at most {MAX_PROJECT_FILES} files and {MAX_PROJECT_CHARS:,} characters")
        return edited


class DriverTests(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Hidden tests of a project."""

    driver: str
    """Source of a module with a function `check`, which calls the project and returns plain data."""
    calls: list[tuple[str, str]]
    """Pairs of a call of `check` and its value, in Python."""


class RepositoryTask(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One project with a bug."""

    name: str
    issue: str
    files: dict[str, str]
    """Text by path."""
    tests: DriverTests
    patch: list[Edit]
    """The reference."""

    def reference_replies(self) -> list[str]:
        """Return what a policy replies that knows the patch: all edits at once, then `submit`."""
        calls = [{"name": "edit_file", "arguments": msgspec.to_builtins(edit)} for edit in self.patch]
        return ["\n".join(map(_tool_call_text, calls)), _tool_call_text({"name": "submit", "arguments": {}})]

    def patched(self) -> dict[str, str]:
        """Return the files with the reference patch.

        Raises:
            ValueError: the patch does not fit.
        """
        files = dict(self.files)
        for edit in self.patch:
            files = edit.applied(files)
        return files


def _tool_call_text(call: Mapping[str, object]) -> str:
    return f"<tool_call>\n{json.dumps(call)}\n</tool_call>"


def check_path(path: str) -> None:
    """Check a path of a project.

    Raises:
        ValueError: it leaves the project, is hidden, or has a name that the grader needs.
    """
    parts = PurePosixPath(path).parts
    is_plain = "\0" not in path and len(path.encode()) <= _MAX_PATH_BYTES
    if not parts or not is_plain or path.startswith("/") or str(PurePosixPath(path)) != path:
        raise ValueError(f"expected a relative path such as src/main.py, got {path[:200]!r}")
    if any(part.startswith(".") for part in parts) or parts[0].partition(".")[0] == _RESERVED:
        raise ValueError(f"{path[:200]!r}: names that begin with a dot, and {_RESERVED}, cannot be used")


def load_repository_tasks(folder: str | None = None) -> list[RepositoryTask]:
    """Return the tasks in the YAML files of a folder, one in each; None: the bundled ones.

    Raises:
        ConfigError: there is none, or a file cannot be used.
    """
    root = Path(folder) if folder is not None else Path(__file__).parent
    tasks: list[RepositoryTask] = []
    for file in sorted(root.glob("*.yaml")):
        try:
            task = msgspec.convert(load_yaml(file.read_text(encoding="utf-8")), RepositoryTask)
            for path in task.files:
                check_path(path)
            task.patched()
        except (msgspec.ValidationError, ValueError) as error:
            raise ConfigError(f"{file}: expected a repository task: {error}") from error
        tasks.append(task)
    if not tasks:
        raise ConfigError(f"{root}: there is no repository task; expected YAML files with name, issue, files, tests, patch")
    return tasks


def repository_tasks(folder: str | None = None) -> list[Task]:
    """Return tasks with `question` (the issue), `files`, the hidden `driver` and `calls`, and `reference` replies.

    Args:
        folder: with one YAML file for each task; None: the bundled ones.

    Raises:
        ConfigError: a file cannot be used.
    """
    return [
        Task(
            id=f"repository-{each.name}",
            data={
                "question": each.issue,
                "files": each.files,
                "driver": each.tests.driver,
                "calls": [list(pair) for pair in each.tests.calls],
                "reference": each.reference_replies(),
            },
        )
        for each in load_repository_tasks(folder)
    ]
