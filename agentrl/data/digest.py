"""The identity of the tasks of a run, so that a resumed one notices changed tasks.

Invariant: the digest of tasks depends on their ids, their data and their order alone.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Sequence

import msgspec
import numpy as np

from agentrl.data.stream import TaskStream
from agentrl.errors import ConfigError
from agentrl.types import Task


class StreamDigest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The identity of the tasks that were drawn from an endless source, from the first 16 tasks and every 64th."""

    drawn: int = 0
    """Number of tasks drawn."""
    content: str = ""
    """Digest of the ids and data of the covered tasks, in order."""

    @classmethod
    def of(cls, stream: TaskStream, drawn: int) -> StreamDigest:
        """Return the digest of the first `drawn` tasks of a stream, which makes those again that the digest covers."""
        digest = cls()
        for index in range(drawn):
            digest = digest.with_task(stream.task(index)) if _is_covered(index) else digest.with_task(None)
        return digest

    def with_task(self, task: Task | None) -> StreamDigest:
        """Return the digest after one more task; None for a task that the digest does not cover."""
        content = self.content
        if _is_covered(self.drawn) and task is not None:
            content = _digest_json([content, task.id, task.data])
        return StreamDigest(drawn=self.drawn + 1, content=content)


class TaskDigest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The identity of a task set: its number of tasks, their order and their content."""

    count: int
    """Number of tasks of the sources that end."""
    order: str
    """Digest of the ids, in order."""
    content: str
    """Digest of ids and data, whatever the order."""
    streams: tuple[StreamDigest, ...] = ()
    """Of each endless source, in order."""

    @classmethod
    def of(cls, tasks: Sequence[Task]) -> TaskDigest:
        """Return the digest of `tasks`. Values that JSON does not know count by their type alone.

        Example:
            >>> first, second = Task(id="1", data={"a": 1}), Task(id="2", data={"a": 2})
            >>> TaskDigest.of([first, second]).difference(TaskDigest.of([second, first]))
            'the same tasks in another order'
        """
        content = sorted(_digest_json([task.id, task.data]) for task in tasks)
        return cls(count=len(tasks), order=_digest_json([task.id for task in tasks]), content=_digest_json(content))

    def difference(self, before: TaskDigest) -> str | None:
        """Return the difference between these tasks and `before`; None where there is none."""
        if self.count != before.count:
            return f"{self.count} tasks instead of {before.count}"
        if self.content != before.content:
            return "ids or data of some tasks have changed"
        if self.order != before.order:
            return "the same tasks in another order"
        if len(self.streams) != len(before.streams):
            return f"{len(self.streams)} endless sources instead of {len(before.streams)}"
        changed = [
            number for number, pair in enumerate(zip(self.streams, before.streams, strict=True), 1) if pair[0] != pair[1]
        ]
        return f"endless source {changed[0]} gives other tasks than before" if changed else None


def check_unique(tasks: Sequence[Task], source: str = "tasks") -> None:
    """Refuse an empty task set, and one in which two tasks have the same id; `source` names it in the ConfigError."""
    if not tasks:
        raise ConfigError(f"{source} holds no tasks; expected at least one")
    [(most, count)] = Counter(task.id for task in tasks).most_common(1)
    if count > 1:
        raise ConfigError(f"{source}: {count} tasks have the id {most!r}; ids must be unique within a task set")


def _is_covered(index: int) -> bool:
    return index < 16 or index % 64 == 0


def _digest_json(value: object) -> str:
    try:
        text = json.dumps(value, sort_keys=True, default=_as_json)
    except (TypeError, ValueError):  # keys of several types, or data that contains itself
        text = f"<{type(value).__qualname__}>"
    return hashlib.blake2b(text.encode(errors="backslashreplace"), digest_size=16).hexdigest()


def _as_json(value: object) -> object:
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    return f"<{type(value).__qualname__}>"
