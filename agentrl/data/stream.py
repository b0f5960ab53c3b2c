"""Sources of tasks that never end: a task for each number, made when it is drawn.

Invariant: the task of a number is always the same one, so that a resumed run draws what the first process would have drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol, cast, runtime_checkable

from agentrl.errors import ConfigError
from agentrl.types import Task


@runtime_checkable
class TaskStream(Protocol):
    """Tasks without an end; a factory that returns an object with this method returns a stream.

    Example:
        >>> class Sums:
        ...     def task(self, index: int) -> Task:
        ...         return Task(id=str(index), data={"question": f"{index} + {index}", "answer": 2 * index})
        >>> isinstance(Sums(), TaskStream), Sums().task(1_000_000)["answer"]
        (True, 2000000)
    """

    def task(self, index: int) -> Task:
        """Return task number `index`, from 0: the same one at each call with this number, in every process.

        The engine calls it in a thread, one call at a time, so it may block. What it raises ends the run.
        """
        ...


def stream_task(stream: TaskStream, index: int, name: str) -> Task:
    """Return task number `index` of the stream `name` of a user."""
    where = f"{name}.task({index})"
    try:
        task = cast("object", stream.task(index))
    except ConfigError as error:
        text = str(error)
        raise ConfigError(text if name in text else f"{where}: {text}") from error
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{where} raised {type(error).__name__}: {error}") from error
    if not isinstance(task, Task):
        raise ConfigError(f"{where}: expected an agentrl.Task, got {type(task).__name__}")
    return task


class IteratedStream:
    """The stream of an iterator, which is read as far as tasks are drawn.

    For an earlier task, or after the end, it calls `start` and skips; each call must lead to the same tasks.

    Example:
        >>> words = IteratedStream("words", lambda: (Task(id=word, data={}) for word in ("a", "b", "c")))
        >>> [words.task(index).id for index in (0, 2, 1, 4)]
        ['a', 'c', 'b', 'b']
    """

    def __init__(self, name: str, start: Callable[[], Iterator[Task]]) -> None:
        self._name, self._start = name, start
        self._iterator, self._next = start(), 0
        self._length: int | None = None

    def task(self, index: int) -> Task:
        wanted = index if self._length is None else index % self._length
        if wanted < self._next:
            self._iterator, self._next = self._start(), 0
        while True:
            task = next(self._iterator, None)
            if task is None:
                return self._after_the_end(index)
            self._next += 1
            if self._next > wanted:
                return task

    def _after_the_end(self, index: int) -> Task:
        if not self._next:
            raise ConfigError(f"{self._name} holds no tasks; expected at least one")
        if self._length is not None:
            raise ConfigError(
                f"{self._name} ended after {self._next} tasks and had {self._length} before; it must give the same tasks "
                "each time it starts"
            )
        self._length = self._next
        return self.task(index)
