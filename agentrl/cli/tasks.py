"""Tasks and conversations from files: every line is checked before anything starts.

Invariant: a line that is not what it should be is a `ConfigError` with file and line; none is skipped.

Whether what a command will make can be written, asked before it has worked for it.

Invariant: what passes could be written at that moment, and nothing is left of the trial; what does not is one message.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, NamedTuple, cast

import orjson

from agentrl.config import TasksConfig
from agentrl.errors import ConfigError
from agentrl.types import Task
from agentrl.workflow import import_user_module

_TRIAL = bytes(4096)


def check_writable(path: Path, what: str) -> None:
    """Write a file where `path`, or the first directory that has to be made for it, will be; it is removed again.

    Args:
        path: the file or directory the command will make.
        what: names it in the message, such as `--output report.json`.

    Raises:
        ConfigError: it cannot be written, and why.
    """
    place = next(folder for folder in path.absolute().parents if folder.exists())
    try:
        with NamedTemporaryFile(dir=place, prefix=f".{path.name}.") as trial:
            trial.write(_TRIAL)
            trial.flush()
    except OSError as error:
        raise ConfigError(f"{what}: cannot write in {place}: {error.strerror}; mend that, or write elsewhere") from error


class TaskSets(NamedTuple):
    """The tasks of a run."""

    train: tuple[Task, ...]
    evaluation: tuple[Task, ...]
    """Empty where the run has no held-out tasks."""


def load_tasks(config: TasksConfig) -> TaskSets:
    """Return the training and held-out tasks a run names.

    Raises:
        ConfigError: a file or line that cannot be used, a factory that fails, or two tasks with one id in a set.
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
    """Return the tasks of a JSONL file, in order; a task without `id` is named by its line number.

    Raises:
        ConfigError: naming file and line.
    """
    tasks = [Task(id=str(record.get("id", line)), data=record) for line, record in read_jsonl(path)]
    return _unique(tasks, str(path))


def read_jsonl(path: str | Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Yield `(line number, object)` for each non-empty line of a JSONL file.

    Raises:
        ConfigError: the file cannot be read, or a line is not a JSON object.
    """
    try:
        lines = Path(path).read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = orjson.loads(line)
        except orjson.JSONDecodeError as error:
            raise ConfigError(
                f"{path}:{number}: expected a JSON object, got {line[:60]!r} ({error}); mend or remove it"
            ) from error
        if not isinstance(record, dict):
            raise ConfigError(f"{path}:{number}: expected a JSON object, got {type(record).__name__}; mend or remove it")
        yield number, cast("dict[str, Any]", record)


def find_factory(name: str) -> Callable[..., object]:
    """Return the function that `tasks.factory` names.

    Raises:
        ConfigError: it cannot be imported, or is no function.
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
