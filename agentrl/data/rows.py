"""What a row of a file or of a list means as a task: its id, and a whole task where agentrl wrote the row.

Invariant: a task that is written as a row is read with the same id and the same fields.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, cast

import orjson

from agentrl.types import Task

_FORMAT: Final = "agentrl.task"


def task_id(fields: Mapping[str, Any], default: str) -> str:
    """Return the `id` of a row as text; `default` where the field is missing or null."""
    own = fields.get("id")
    return default if own is None else str(own)


def task_row(task: Task) -> bytes:
    """Return a task as one row of JSON lines, with its fields apart from its id.

    Raises:
        TypeError: a field is not JSON.
    """
    row = {"format": _FORMAT, "id": task.id, "data": dict(task.data)}
    return orjson.dumps(row, option=orjson.OPT_SERIALIZE_NUMPY)


def given_task(fields: Mapping[str, Any]) -> Task | None:
    """Return the task in a row that `task_row` wrote; None for any other row."""
    data = fields.get("data")
    if set(fields) != {"format", "id", "data"} or fields["format"] != _FORMAT or not isinstance(data, dict):
        return None
    return Task(id=str(fields["id"]), data=cast("dict[str, Any]", data))
