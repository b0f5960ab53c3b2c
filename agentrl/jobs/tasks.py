"""The tasks of a run, from files or a function.

Invariant: every task is checked before anything starts, and ids are unique within a set.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import orjson

from agentrl.config import TasksConfig
from agentrl.errors import ConfigError
from agentrl.jobs.files import read_jsonl
from agentrl.types import Task
from agentrl.workflow import import_user_module

_TASK_OPTIONS = orjson.OPT_SERIALIZE_NUMPY


class TaskSets(NamedTuple):
    """The tasks of a run."""

    train: tuple[Task, ...]
    evaluation: tuple[Task, ...]
    """Empty where the run has no held-out tasks."""


def load_tasks(config: TasksConfig) -> TaskSets:
    """Return the training and held-out tasks that a run names.

    Raises:
        ConfigError: a file or line cannot be used, a factory fails, or two tasks of a set share an id.
    """
    if config.factory is not None:
        make = find_factory(config.factory)
        train = _from_factory(make, config.factory, config.factory_args)
        held_out = () if config.eval_factory_args is None else _from_factory(make, config.factory, config.eval_factory_args)
    else:
        train = read_tasks(cast("str", config.path))
        held_out = () if config.eval_path is None else read_tasks(config.eval_path)
    return TaskSets(train, held_out)


def read_tasks(path: str | Path) -> tuple[Task, ...]:
    """Return the tasks of a JSONL file, in order; a task without `id` gets its line number.

    Raises:
        ConfigError: naming file and line.
    """
    tasks = [Task(id=str(record.get("id", line)), data=record) for line, record in read_jsonl(path)]
    return _unique(tasks, str(path))


TASK_FILES = ("tasks.jsonl", "eval_tasks.jsonl")
"""Files of a run directory that hold the tasks of a run that was given them as objects."""


def write_task_sets(folder: Path, tasks: TaskSets) -> None:
    """Write tasks as `TASK_FILES`, from which `read_tasks` reads the same ids and fields.

    Raises:
        OSError: a file cannot be written.
    """
    for name, some in zip(TASK_FILES, tasks, strict=True):
        if some:
            lines = [_task_line(task, number) for number, task in enumerate(some, start=1)]
            (folder / name).write_bytes(b"\n".join([*lines, b""]))


def _task_line(task: Task, number: int) -> bytes:
    has_id = str(task.data.get("id", number)) == task.id
    return orjson.dumps(dict(task.data) if has_id else {**task.data, "id": task.id}, option=_TASK_OPTIONS)


def given_tasks(given: Sequence[object], where: str) -> tuple[Task, ...]:
    """Return tasks from a list of `Task` or of mappings; a mapping without `id` gets its number, from 1.

    Raises:
        ConfigError: an entry is neither, its fields are not JSON, or two share an id; the message names it after `where`.
    """
    tasks: list[Task] = []
    for number, entry in enumerate(given, start=1):
        if isinstance(entry, Mapping):
            fields = cast("Mapping[str, Any]", entry)
            entry = Task(id=str(fields.get("id", number)), data=fields)
        if not isinstance(entry, Task):
            raise ConfigError(f"{where}[{number - 1}]: expected a mapping or agentrl.Task, got {type(entry).__name__}")
        try:
            orjson.dumps(dict(entry.data), option=_TASK_OPTIONS)
        except TypeError as error:
            raise ConfigError(f"{where}[{number - 1}]: the fields of a task must be JSON: {error}") from error
        tasks.append(entry)
    return _unique(tasks, where)


def find_factory(name: str) -> Callable[..., object]:
    """Return the function that `tasks.factory` names.

    Raises:
        ConfigError: it cannot be imported, or is not callable.
    """
    module_name, _, attribute = name.partition(":")
    if not attribute:
        raise ConfigError(f"tasks.factory: expected module:function, got {name!r}")
    try:
        found = getattr(import_user_module(module_name, "tasks.factory"), attribute)
    except AttributeError as error:
        raise ConfigError(f"tasks.factory: cannot import {name}: {error}") from error
    if not callable(found):
        raise ConfigError(f"tasks.factory: {name} is not callable")
    return found


def _from_factory(make: Callable[..., object], name: str, arguments: Mapping[str, Any]) -> tuple[Task, ...]:
    try:
        made = make(**arguments)
    except ConfigError as error:
        raise ConfigError(f"tasks.factory: {name}: {error}") from error
    except Exception as error:
        what = f"{name}(**{dict(arguments)}) raised {type(error).__name__}"
        raise ConfigError(f"tasks.factory: {what}: {error}; check factory_args") from error
    if not isinstance(made, Sequence) or not all(isinstance(task, Task) for task in cast("Sequence[object]", made)):
        raise ConfigError(f"tasks.factory: {name} must return a sequence of agentrl.Task, got {type(made).__name__}")
    return _unique(cast("Sequence[Task]", made), name)


def _unique(tasks: Sequence[Task], source: str) -> tuple[Task, ...]:
    if not tasks:
        raise ConfigError(f"{source} holds no tasks; expected at least one")
    seen: set[str] = set()
    for task in tasks:
        if task.id in seen:
            raise ConfigError(f"{source}: two tasks have the id {task.id!r}; ids must be unique")
        seen.add(task.id)
    return tuple(tasks)
