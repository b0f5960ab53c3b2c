"""The order in which a run draws its tasks.

Invariant: the order depends on the tasks and the seed alone; every task is drawn once before any is drawn again.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence

from agentrl.errors import ConfigError
from agentrl.types import Task


def task_order(tasks: Sequence[Task], seed: int) -> Iterator[Task]:
    """Yield tasks for ever, each pass over them in a new order.

    Raises:
        ConfigError: when there are none, or two have one id.

    Example:
        >>> order = task_order([Task(id=i, data={}) for i in "ab"], seed=0)
        >>> sorted(next(order).id for _ in range(2))
        ['a', 'b']
    """
    check_tasks(tasks)
    return _passes(list(tasks), seed)


def check_tasks(tasks: Sequence[Task]) -> None:
    """Check a task set.

    Raises:
        ConfigError: when there are no tasks, or two have one id.
    """
    if not tasks:
        raise ConfigError("there are no tasks; check tasks.path or tasks.factory")
    [(most, count)] = Counter(task.id for task in tasks).most_common(1)
    if count > 1:
        raise ConfigError(f"{count} tasks have the id {most!r}; ids must be unique within a task set")


def _passes(tasks: list[Task], seed: int) -> Iterator[Task]:
    number = 0
    while True:
        order = list(tasks)
        random.Random(f"task order {seed} {number}").shuffle(order)
        yield from order
        number += 1
