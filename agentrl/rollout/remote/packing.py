"""Generations and tasks as messages; `agentrl.episode.codec` packs turns and trajectories.

Invariant: unpacking what was packed gives the same arrays, bit for bit, and the same values.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import msgspec
import numpy as np

from agentrl.episode.checks import check_spans
from agentrl.episode.codec import unpacked
from agentrl.errors import ConfigError, InvariantError
from agentrl.inference.backend import Generation
from agentrl.types import Int32Array, Task


def unpack_generation(message: msgspec.Raw) -> Generation:
    """Return the generation; raises `InvariantError` when its parts contradict each other."""
    found = unpacked(message, Generation)
    if len(found.output_logprobs) != len(found.output_ids):
        raise InvariantError(
            f"a rollout message has {len(found.output_logprobs)} log-probs for {len(found.output_ids)} token ids"
        )
    check_spans(found.spans, len(found.output_ids), None, "a rollout message")
    return found


def pack_task(task: Task) -> bytes:
    """Return the fields of a task as msgpack; a field that would come back as something else is a ConfigError."""
    try:
        packed = msgspec.msgpack.encode(dict(task.data))
        if _arrived_same(msgspec.msgpack.decode(packed), dict(task.data)):
            return packed
        why = "a value would arrive as another type"
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        why = str(error)
    raise ConfigError(
        f"task {task.id}: its fields cannot be sent to a rollout worker unchanged: {why}; make them of texts, numbers, "
        "lists and dictionaries with texts as keys, or set rollout.runner: local"
    )


def unpack_task(task_id: str, packed: bytes) -> Task:
    """Return the task; raises `InvariantError` when its fields are not a mapping."""
    try:
        return Task(id=task_id, data=msgspec.msgpack.decode(packed, type=dict[str, Any]))
    except msgspec.DecodeError as error:
        raise InvariantError(f"task {task_id}: the driver sent no mapping of fields: {error}") from error


def ids_bytes(ids: Int32Array) -> bytes:
    """Return int32 values as bytes."""
    return np.ascontiguousarray(ids, "<i4").tobytes()


def bytes_ids(data: bytes) -> Int32Array:
    """Return the int32 values in `data`; raises `InvariantError` when it holds no whole number of them."""
    if len(data) % 4:
        raise InvariantError(f"a rollout message has {len(data)} bytes of token ids, which are 4 bytes each")
    return np.frombuffer(data, "<i4").astype(np.int32, copy=False)


def _arrived_same(read: object, given: object) -> bool:
    """Return whether a value that was read back equals the given one, types included; NaN equals NaN."""
    if type(read) is not type(given):
        return False
    if isinstance(read, dict):
        mine, other = cast("Mapping[object, object]", read), cast("Mapping[object, object]", given)
        return mine.keys() == other.keys() and all(_arrived_same(mine[key], other[key]) for key in mine)
    if isinstance(read, list):
        ours, others = cast("list[object]", read), cast("list[object]", given)
        return len(ours) == len(others) and all(map(_arrived_same, ours, others))
    return read == given or read != read  # the second is True for NaN alone
