"""The order in which a run draws its tasks.

Invariant: the order depends on the tasks and the seed alone; every task is drawn once before any is drawn again.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

from agentrl.errors import ConfigError
from agentrl.types import Task


class TaskOrder:
    """The task of each group number; each pass over the tasks has an order of its own.

    Example:
        >>> order = TaskOrder([Task(id=i, data={}) for i in "ab"], seed=0)
        >>> sorted(order[number].id for number in (2, 3)), order[5] is order[5]
        (['a', 'b'], True)
    """

    def __init__(self, tasks: Sequence[Task], seed: int) -> None:
        """Keep the tasks.

        Raises:
            ConfigError: when there are no tasks, or two have the same id.
        """
        check_tasks(tasks)
        self._tasks = tuple(tasks)
        self._seed = seed
        self._pass, self._shuffled = -1, list(self._tasks)

    def __getitem__(self, number: int) -> Task:
        """Return the task of group `number`, from 0."""
        wanted, at = divmod(number, len(self._tasks))
        if wanted != self._pass:
            self._pass, self._shuffled = wanted, list(self._tasks)
            random.Random(f"task order {self._seed} {wanted}").shuffle(self._shuffled)
        return self._shuffled[at]


def check_tasks(tasks: Sequence[Task]) -> None:
    """Check a task set.

    Raises:
        ConfigError: when there are no tasks, or two have the same id.
    """
    if not tasks:
        raise ConfigError("there are no tasks; check tasks.path or tasks.factory")
    [(most, count)] = Counter(task.id for task in tasks).most_common(1)
    if count > 1:
        raise ConfigError(f"{count} tasks have the id {most!r}; ids must be unique within a task set")
