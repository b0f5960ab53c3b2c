"""Tasks that a Python program gives as objects, and the files of a run directory that hold them.

Invariant: `read_tasks` reads from these files the ids and fields that were given.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, cast

from agentrl.data.config import SourceConfig
from agentrl.data.digest import check_unique
from agentrl.data.rows import task_id, task_row
from agentrl.data.source import open_source
from agentrl.errors import ConfigError
from agentrl.types import Task

TASK_FILES: Final = ("tasks.jsonl", "eval_tasks.jsonl")
"""Files of a run directory that hold the training and the held-out tasks of a run that was given them as objects."""


def read_tasks(path: str | Path) -> tuple[Task, ...]:
    """Return the tasks of a file, in order; a task without `id` gets the number of its line or row.

    Raises:
        ConfigError: the file or a row cannot be used.
    """
    return cast("tuple[Task, ...]", open_source(SourceConfig(path=str(path)), "tasks"))


def write_task_files(folder: Path, tasks: Sequence[Task], evaluation: Sequence[Task]) -> None:
    """Write tasks as `TASK_FILES`, from which `read_tasks` reads the same ids and fields.

    Raises:
        OSError: a file cannot be written.
    """
    for name, some in zip(TASK_FILES, (tasks, evaluation), strict=True):
        if some:
            lines = [task_row(task) for task in some]
            (folder / name).write_bytes(b"\n".join([*lines, b""]))


def given_tasks(given: Sequence[object], where: str) -> tuple[Task, ...]:
    """Return tasks from a list of `Task` or of mappings; a mapping without `id` gets its number, from 1.

    Raises:
        ConfigError: an entry is neither, its fields are not JSON, or two share an id; the message names it after `where`.
    """
    tasks: list[Task] = []
    for number, entry in enumerate(given, start=1):
        if isinstance(entry, Mapping):
            fields = cast("Mapping[str, Any]", entry)
            entry = Task(id=task_id(fields, str(number)), data=fields)
        if not isinstance(entry, Task):
            raise ConfigError(f"{where}[{number - 1}]: expected a mapping or agentrl.Task, got {type(entry).__name__}")
        try:
            task_row(entry)
        except TypeError as error:
            raise ConfigError(f"{where}[{number - 1}]: the fields of a task must be JSON: {error}") from error
        tasks.append(entry)
    check_unique(tasks, where)
    return tuple(tasks)
