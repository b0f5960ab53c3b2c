"""The tasks of a run: of the training sources, held-out, and given by a program as objects.

Invariant: every source is opened and checked before anything starts.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple, cast

from agentrl.data.config import SourceConfig, TasksConfig
from agentrl.data.curriculum import Curriculum, load_curriculum
from agentrl.data.digest import StreamDigest, TaskDigest, check_unique
from agentrl.data.left_out import LeftOutTask
from agentrl.data.source import OpenedSource, open_source, task_id, task_row
from agentrl.data.stream import TaskStream, stream_task
from agentrl.errors import ConfigError
from agentrl.types import Task


class OpenSource(NamedTuple):
    """One source of training tasks."""

    name: str
    """Origin of its tasks, for messages."""
    tasks: OpenedSource
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class TrainingTasks:
    """The training tasks of a run.

    Example:
        >>> TrainingTasks.of([Task(id="1", data={}), Task(id="2", data={})]).describe()
        '2'
    """

    sources: tuple[OpenSource, ...]
    curriculum: Curriculum | None = None
    skip_passes: int = 0
    """Passes that a task of a source that ends sits out after a group that taught nothing."""

    @classmethod
    def of(cls, tasks: Sequence[Task] | TrainingTasks) -> TrainingTasks:
        """Return `tasks`, a sequence as one source."""
        return tasks if isinstance(tasks, TrainingTasks) else cls((OpenSource("tasks", tuple(tasks)),))

    @property
    def finite(self) -> tuple[Task, ...]:
        """The tasks of the sources that end, in order."""
        return tuple(task for source in self.sources if isinstance(source.tasks, tuple) for task in source.tasks)

    @property
    def is_endless(self) -> bool:
        return bool(self.streams)

    @property
    def streams(self) -> tuple[TaskStream, ...]:
        """The sources that never end, in order."""
        return tuple(source.tasks for source in self.sources if not isinstance(source.tasks, tuple))

    def first(self, count: int) -> tuple[Task, ...]:
        """Return the first `count` tasks: first all finite sources, then the endless sources in turn."""
        tasks = list(self.finite[:count])
        if self.streams:
            named = [(source.name, source.tasks) for source in self.sources if isinstance(source.tasks, TaskStream)]
            turns = ((number, stream) for number in itertools.count() for stream in named)
            tasks += [
                stream_task(stream, number, name) for number, (name, stream) in itertools.islice(turns, count - len(tasks))
            ]
        return tuple(tasks)

    def describe(self) -> str:
        """Return how many tasks there are, such as `128`, `endless`, or `128, and 2 endless sources`."""
        if not self.streams:
            return str(len(self.finite))
        several = f"{len(self.streams)} endless sources" if len(self.streams) > 1 else "one endless source"
        return f"{len(self.finite)}, and {several}" if self.finite else "endless"

    def digest(self, drawn: Sequence[int] = ()) -> TaskDigest:
        """Return the digest of these tasks, with the number of tasks that were `drawn` from each endless source."""
        pairs = itertools.zip_longest(self.streams, drawn[: len(self.streams)], fillvalue=0)
        streams = tuple(StreamDigest.of(stream, count) for stream, count in pairs if isinstance(stream, TaskStream))
        finite = TaskDigest.of(self.finite)
        return TaskDigest(count=finite.count, order=finite.order, content=finite.content, streams=streams)


class TaskSets(NamedTuple):
    """The tasks of a run."""

    train: TrainingTasks
    evaluation: tuple[Task, ...]
    left_out: tuple[LeftOutTask, ...] = ()
    """Tasks of both that cannot be read, or that the workflow refuses, in order."""

    @property
    def finite(self) -> tuple[Task, ...]:
        """All tasks of the sets that end."""
        return (*self.train.finite, *self.evaluation)


def load_tasks(config: TasksConfig) -> TaskSets:
    """Return the training and held-out tasks that a run names; held-out tasks that never end are a ConfigError."""
    left_out: list[LeftOutTask] = []
    training, held_out = load_training(config, left_out), load_held_out(config, left_out)
    return TaskSets(training, held_out, tuple(left_out))


def load_training(config: TasksConfig, left_out: list[LeftOutTask] | None = None) -> TrainingTasks:
    """Return the training tasks, and put into `left_out` those that cannot be read.

    With several sources, ids begin with the number of the source.
    """
    opened: list[OpenSource] = []
    for number, source in enumerate(config.training, 1):
        field = f"tasks.sources.{number - 1}" if config.sources else "tasks"
        tasks = open_source(source, field, left_out)
        if len(config.training) > 1:
            tasks = _renamed(tasks, f"{number}/")
        name = f"source {number}: {source.origin}" if config.sources else source.origin
        opened.append(OpenSource(name, tasks, source.weight))
    curriculum = None if config.curriculum is None else load_curriculum(config.curriculum, config.curriculum_args)
    tasks = TrainingTasks(tuple(opened), curriculum, config.skip_passes)
    if tasks.skip_passes and not tasks.finite:
        raise ConfigError("tasks.skip_passes: endless sources have no passes; use a curriculum, or set a limit")
    return tasks


def load_held_out(config: TasksConfig, left_out: list[LeftOutTask] | None = None) -> tuple[Task, ...]:
    """Return the held-out tasks, and put into `left_out` those that cannot be read."""
    source = config.eval
    if source is None:
        return ()
    tasks = open_source(source, "tasks.eval", left_out)
    if isinstance(tasks, TaskStream):
        raise ConfigError(
            f"tasks.eval: {source.origin} never ends, but an evaluation needs a fixed set; set tasks.eval with a limit"
        )
    return tasks


class _RenamedStream:
    def __init__(self, stream: TaskStream, prefix: str) -> None:
        self._stream, self._prefix = stream, prefix

    def task(self, index: int) -> Task:
        task = self._stream.task(index)
        return Task(id=f"{self._prefix}{task.id}", data=task.data)


def _renamed(tasks: OpenedSource, prefix: str) -> OpenedSource:
    if isinstance(tasks, TaskStream):
        return _RenamedStream(tasks, prefix)
    return tuple(Task(id=f"{prefix}{task.id}", data=task.data) for task in tasks)


TASK_FILES: Final = ("tasks.jsonl", "eval_tasks.jsonl")
"""Files of a run directory that hold the training and the held-out tasks of a run that was given them as objects."""


def read_tasks(path: str | Path) -> tuple[Task, ...]:
    """Return the tasks of a file, in order; a task without `id` gets the number of its line or row."""
    return cast("tuple[Task, ...]", open_source(SourceConfig(path=str(path)), "tasks"))


def write_task_files(folder: Path, tasks: Sequence[Task], evaluation: Sequence[Task]) -> None:
    """Write tasks as `TASK_FILES`, from which `read_tasks` reads the same ids and fields."""
    for name, some in zip(TASK_FILES, (tasks, evaluation), strict=True):
        if some:
            lines = [task_row(task) for task in some]
            (folder / name).write_bytes(b"\n".join([*lines, b""]))


def given_tasks(given: Sequence[object], where: str) -> tuple[Task, ...]:
    """Return tasks from `Task`s or mappings; a mapping without `id` gets its number, from 1. Errors begin with `where`."""
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
