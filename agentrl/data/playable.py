"""Tasks that can be read and that the workflow refuses all the same, left out where their source says `unreadable: skip`.

Invariant: a task is left out with its reason or stays; a source of which none stays is an error.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import TypeAlias

from agentrl.data.config import SourceConfig, TasksConfig
from agentrl.data.left_out import LeftOutTask, reason_rows
from agentrl.data.load import OpenSource, TaskSets, TrainingTasks
from agentrl.errors import ConfigError
from agentrl.types import Task

logger = logging.getLogger(__name__)

Refusal: TypeAlias = Callable[[Task], str]
"""`RolloutWorkflow.refusal` of the workflow of a run."""


def playable_tasks(sets: TaskSets, config: TasksConfig, refusal: Refusal) -> TaskSets:
    """Return the sets of a run without the tasks that its workflow refuses, where their source skips such tasks.

    Raises:
        ConfigError: no task of a source stays; the message counts the reasons.
    """
    left_out = list(sets.left_out)
    train = playable_training(sets.train, config, refusal, left_out)
    return TaskSets(train, playable_held_out(sets.evaluation, config, refusal, left_out), tuple(left_out))


def playable_training(
    tasks: TrainingTasks, config: TasksConfig, refusal: Refusal, left_out: list[LeftOutTask] | None = None
) -> TrainingTasks:
    """Return the training tasks that the workflow plays, and put the others into `left_out`, as `playable_tasks` does."""
    left_out = [] if left_out is None else left_out
    kept: list[OpenSource] = []
    for number, (opened, source) in enumerate(zip(tasks.sources, config.training, strict=True), 1):
        field = f"tasks.sources.{number - 1}" if config.sources else "tasks"
        prefix = f"{number}/" if len(config.training) > 1 else ""
        some = opened.tasks
        kept.append(
            opened._replace(tasks=_playable(some, source, field, prefix, refusal, left_out))
            if isinstance(some, tuple)
            else opened
        )
    return replace(tasks, sources=tuple(kept))


def playable_held_out(
    tasks: tuple[Task, ...], config: TasksConfig, refusal: Refusal, left_out: list[LeftOutTask] | None = None
) -> tuple[Task, ...]:
    """Return the held-out tasks that the workflow plays, and put the others into `left_out`, as `playable_tasks` does."""
    left_out = [] if left_out is None else left_out
    return tasks if config.eval is None else _playable(tasks, config.eval, "tasks.eval", "", refusal, left_out)


def _playable(
    tasks: tuple[Task, ...],
    source: SourceConfig,
    field: str,
    prefix: str,
    refusal: Refusal,
    left_out: list[LeftOutTask],
) -> tuple[Task, ...]:
    if source.unreadable != "skip":
        return tasks
    refused = {task.id: reason for task in tasks if (reason := refusal(task))}
    if not refused:
        return tasks
    found = [LeftOutTask(field, name.removeprefix(prefix), reason) for name, reason in refused.items()]
    if len(refused) == len(tasks):
        rows = "\n  ".join(reason_rows((task.name, task.reason) for task in found))
        raise ConfigError(f"{field}.path: none of the {len(tasks)} tasks of {source.origin} can be played:\n  {rows}")
    left_out += found
    logger.warning("%s: %d task folders of %s cannot be played, and are left out", field, len(found), source.origin)
    return tuple(task for task in tasks if task.id not in refused)
