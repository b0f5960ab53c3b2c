"""The form of an episode outside of Python: JSON in the files of a run, msgpack between processes.

Invariant: both forms hold the fields that `Turn` and `Trajectory` declare, and are checked against that declaration when
they are read. Arrays are numbers in JSON and little-endian bytes in msgpack, and arrive bit for bit. In both, a value that
JSON lacks becomes its description. A number that is not finite is null in JSON.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields, replace
from typing import Any, TypeAlias, TypeVar, cast

import msgspec
import numpy as np
import orjson

from agentrl.episode.checks import check_turn
from agentrl.episode.summary import EndedEpisode, is_success, on_clock
from agentrl.episode.trajectory import Float32Array, Int32Array, Task, Trajectory, Turn
from agentrl.errors import InvariantError

Record = TypeVar("Record")
Timed = TypeVar("Timed", Turn, Trajectory)
Fields: TypeAlias = dict[str, Any]
RECORDED_TURN = tuple(field.name for field in fields(Turn) if field.name != "prompt_digest")
"""The fields of a turn in a record, in order."""
RECORDED_EPISODE = tuple(field.name for field in fields(Trajectory) if field.name != "turn_reward_parts")
"""The fields of a trajectory in a record, in order."""
SCORED = ("stop_reason", "final_reward", "advantage", "failure", "metrics", "reward_parts")
"""The fields that the scoring of a group changes."""
_SPOKEN = ("message", "messages", "tools")
_MAX_DEPTH = 200
"""Levels of a record that can be written; orjson takes 254."""
_OPTIONS = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS | orjson.OPT_APPEND_NEWLINE


def encode_line(record: Mapping[str, object]) -> bytes:
    """Return `record` as one line of JSON; numpy arrays become lists, NaN and infinities null, other objects their repr.

    So do numbers of more than 64 bits. Half of a surrogate pair becomes its escape; a value nested too deeply, a note.
    """
    try:
        return orjson.dumps(record, default=repr, option=_OPTIONS)
    except TypeError:  # data of a user that JSON, or UTF-8, does not have
        return orjson.dumps(_encodable(record, _MAX_DEPTH), default=repr, option=_OPTIONS)


def trajectory_record(ended: EndedEpisode) -> Fields:
    """Return the line of one episode in `episodes/step-NNNNNN.jsonl`; its times are on the run's clock."""
    trajectory, failure = ended.trajectory, ended.trajectory.failure
    record: Fields = {name: getattr(ended, name) for name in ("purpose", "group", "step", "policy_version")}
    for name in RECORDED_EPISODE:
        record[name] = getattr(trajectory, name)
        if name == "advantage":
            record["episode_return"] = trajectory.episode_return if failure is None else None
            record["success"] = is_success(trajectory) if failure is None else None
    return record | {
        "task": None if trajectory.task is None else dict(trajectory.task.data),
        "failure": failure and asdict(failure),
        "metrics": dict(trajectory.metrics),
        "turns": [turn_record(turn, ended.run_begin_s) for turn in trajectory.turns],
        "reward_parts": dict(trajectory.reward_parts) or None,
        **_on_run_clock(trajectory, ended.run_begin_s),
    }


def turn_record(turn: Turn, run_begin_s: float = 0.0) -> Fields:
    """Return a turn of a record; its times are those after `run_begin_s`."""
    return {name: getattr(turn, name) for name in RECORDED_TURN if name not in _needless_fields(turn)} | {
        "messages": [dict(message) for message in turn.messages],
        "tools": None if turn.tools is None else list(turn.tools),
        "message": dict(turn.message),
        "context_ids": np.ascontiguousarray(turn.context_ids),
        "output_ids": np.ascontiguousarray(turn.output_ids),
        "output_logprobs": np.ascontiguousarray(turn.output_logprobs),
        "spans": [list(span) for span in turn.spans],
        **_on_run_clock(turn, run_begin_s),
    }


def stored_trajectory(record: bytes) -> Trajectory:
    """Return the trajectory of a line of `step-NNNNNN.jsonl`, its times on the run's clock; raises msgspec.DecodeError."""
    found = msgspec.json.decode(record, type=Fields)
    for index, turn in enumerate(cast("Sequence[Fields]", found.get("turns", ()))):
        if turn.get("sent_at") is None:  # an older record: a reward is set when its turn completes, a request sent after it
            turn["sent_at"] = 2 * turn["sent_after"] + 1
            turn["rewarded_at"] = None if turn["reward"] is None else 2 * index + 2
    if found.get("task") is not None:
        found["task"] = {"id": found["task_id"], "data": found["task"]}
    for name in ("metrics", "reward_parts"):
        numbers = cast("Mapping[str, float | None]", found.get(name) or {})
        found[name] = {key: float("nan") if value is None else value for key, value in numbers.items()}
    return msgspec.convert(found, Trajectory, dec_hook=_array)


def _needless_fields(turn: Turn) -> Sequence[str]:
    """Return the fields that a record of the turn has no need of."""
    return ("truncated_by",) if turn.truncated_by is None else ()


def pack_turn(turn: Turn) -> msgspec.Raw:
    """Return `turn` as a part of a message."""
    return packed(_turn_fields(turn))


def pack_trajectory(trajectory: Trajectory) -> msgspec.Raw:
    """Return `trajectory`, without its task, as a part of a message."""
    own: Fields = {field.name: getattr(trajectory, field.name) for field in fields(Trajectory) if field.name != "task"}
    return packed({**own, "turns": list(map(_turn_fields, trajectory.turns))})


def pack_score(scored: Trajectory) -> msgspec.Raw:
    """Return the score of an episode as a part of a message."""
    return packed({name: getattr(scored, name) for name in SCORED})


def unpack_turn(message: msgspec.Raw, clock_offset_s: float = 0.0) -> Turn:
    """Return the turn, its times `clock_offset_s` later."""
    turn = unpacked(message, Turn, _with_conversation)
    check_turn(turn, None, "a turn of a rollout message")
    return _later(turn, clock_offset_s)


def unpack_trajectory(message: msgspec.Raw, task: Task, clock_offset_s: float = 0.0) -> Trajectory:
    """Return the trajectory of an episode of `task`, its times `clock_offset_s` later."""
    trajectory = unpacked(message, Trajectory, _with_conversations)
    for index, turn in enumerate(trajectory.turns):
        where = f"turn {index} of a rollout message"
        if turn.parent is not None and not 0 <= turn.parent < index:
            raise InvariantError(f"{where} continues turn {turn.parent}; a parent stands before its children")
        check_turn(turn, None if turn.parent is None else trajectory.turns[turn.parent], where)
    turns = tuple(_later(turn, clock_offset_s) for turn in trajectory.turns)
    return _later(replace(trajectory, task=task, turns=turns), clock_offset_s)


def with_score(episode: Trajectory, message: msgspec.Raw) -> Trajectory:
    """Return `episode` with its score."""
    unscored: Fields = {"episode_id": episode.episode_id, "task_id": episode.task_id, "turns": ()}
    scored = unpacked(message, Trajectory, lambda found: found | unscored)
    return replace(episode, **{name: getattr(scored, name) for name in SCORED})


def packed(record: object) -> msgspec.Raw:
    """Return a record, a dataclass or its fields, as a part of a message."""
    return msgspec.Raw(msgspec.msgpack.encode(record, enc_hook=_plain))


def unpacked(message: msgspec.Raw, kind: type[Record], prepare: Callable[[Fields], Fields] = dict) -> Record:
    """Return the record of this kind in a part of a message; `prepare` makes its fields from those that were sent."""
    try:
        return msgspec.convert(prepare(msgspec.msgpack.decode(message, type=Fields)), kind, dec_hook=_array)
    except (msgspec.DecodeError, TypeError) as error:
        raise InvariantError(f"a rollout message holds no {kind.__name__}: {error}") from error


def _with_conversations(found: Fields) -> Fields:
    return found | {"turns": list(map(_with_conversation, msgspec.convert(found.get("turns"), list[Fields])))}


def _with_conversation(turn: Fields) -> Fields:
    return turn | msgspec.json.decode(turn.pop("conversation", b"{}"), type=Fields)


def _turn_fields(turn: Turn) -> Fields:
    found: Fields = {field.name: getattr(turn, field.name) for field in fields(Turn) if field.name not in _SPOKEN}
    for name in _needless_fields(turn):
        del found[name]
    spoken = {"message": turn.message, "messages": turn.messages, "tools": turn.tools}
    return {**found, "conversation": encode_line(spoken)}


def _plain(value: object) -> object:
    if isinstance(value, np.ndarray):
        array = cast("np.ndarray[Any, Any]", value)
        return np.ascontiguousarray(array, array.dtype.newbyteorder("<")).tobytes()
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} is no field of an episode")


def _array(kind: Any, value: object) -> Int32Array | Float32Array:  # noqa: ANN401 - an alias such as NDArray[np.int32]
    dtype = np.dtype(kind.__args__[1].__args__[0])
    if isinstance(value, bytes):
        return np.frombuffer(value, dtype.newbyteorder("<")).astype(dtype, copy=False)
    return np.array(value, dtype)


def _on_run_clock(timed: Turn | Trajectory, begin_s: float) -> dict[str, float | None]:
    return {"started_s": on_clock(timed.started_s, begin_s), "ended_s": on_clock(timed.ended_s, begin_s)}


def _later(timed: Timed, offset_s: float) -> Timed:
    if not offset_s:
        return timed
    moments = (timed.started_s, timed.ended_s)
    started_s, ended_s = (None if moment is None else moment + offset_s for moment in moments)
    return replace(timed, started_s=started_s, ended_s=ended_s)


def _encodable(value: object, depth: int) -> object:
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, int) and not -(2**63) <= value < 2**64:
        return repr(value)
    if isinstance(value, (Mapping, list, tuple)) and not depth:
        return f"{type(value).__name__}, nested too deeply"
    if isinstance(value, Mapping):
        items = cast("Mapping[object, object]", value).items()
        return {str(_encodable(str(name), depth)): _encodable(field, depth - 1) for name, field in items}
    if isinstance(value, (list, tuple)):
        return [_encodable(item, depth - 1) for item in cast("Sequence[object]", value)]
    return value
