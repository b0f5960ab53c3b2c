"""Turns, trajectories, generations and tasks as messages: arrays as little-endian bytes, a user's own values as JSON.

Invariant: unpacking what was packed gives the same arrays, bit for bit, and the same numbers. Messages and tool schemas come
back as the records of episodes hold them: a value that JSON lacks becomes its description, as on the disk.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import msgspec
import numpy as np

from agentrl.errors import ConfigError, InvariantError
from agentrl.inference.backend import Generation
from agentrl.observe.records import encode_line
from agentrl.types import (
    EpisodeFailure,
    Float32Array,
    ForkReason,
    Int32Array,
    Message,
    StopReason,
    Task,
    Trajectory,
    Turn,
    VersionSpan,
)

PackedSpans = tuple[tuple[int, int, int], ...]
"""Start, end and version of each."""
PackedFailure = tuple[str, str, str, str | None]
"""Kind, message, traceback, and the line that raised right after a turn."""


class PackedGeneration(msgspec.Struct, frozen=True):
    """A `Generation`."""

    output_ids: bytes
    output_logprobs: bytes
    spans: PackedSpans
    stop_reason: StopReason
    matched_stop: int | str | None
    cached_tokens: int
    num_retractions: int
    server: str


class PackedTurn(msgspec.Struct, frozen=True):
    """A `Turn`."""

    context_ids: bytes
    output_ids: bytes
    output_logprobs: bytes
    spans: PackedSpans
    stop_reason: StopReason
    reward: float | None
    role: str
    player: str
    branch: tuple[int, ...]
    sent_after: int
    sent_at: int
    rewarded_at: int | None
    parent: int | None
    temperature: float
    fork: ForkReason | None
    kept_thinking: bool
    prompt_digest: bytes
    conversation: bytes
    """JSON: `message`, `messages` and `tools`."""
    started_s: float | None
    """On the worker's clock, as `ended_s`."""
    ended_s: float | None


class PackedTrajectory(msgspec.Struct, frozen=True):
    """A `Trajectory` without its task."""

    episode_id: str
    task_id: str
    turns: tuple[PackedTurn, ...]
    stop_reason: StopReason
    final_reward: float | None
    advantage: float | None
    failure: PackedFailure | None
    metrics: dict[str, float]
    reward_parts: dict[str, float]
    turn_reward_parts: dict[str, float]
    answer: str | None
    started_s: float | None
    """On the worker's clock, as `ended_s`."""
    ended_s: float | None


class PackedScore(msgspec.Struct, frozen=True):
    """What the scoring of a group changes in one of its episodes."""

    stop_reason: StopReason
    final_reward: float | None
    advantage: float | None
    failure: PackedFailure | None
    metrics: dict[str, float]
    reward_parts: dict[str, float]


class _Conversation(msgspec.Struct, frozen=True):
    message: dict[str, Any]
    messages: tuple[dict[str, Any], ...]
    tools: list[dict[str, Any]] | None


def pack_generation(generation: Generation) -> PackedGeneration:
    """Return `generation` as a part of a message."""
    return PackedGeneration(
        output_ids=ids_bytes(generation.output_ids),
        output_logprobs=_float_bytes(generation.output_logprobs),
        spans=_pack_spans(generation.spans),
        stop_reason=generation.stop_reason,
        matched_stop=generation.matched_stop,
        cached_tokens=generation.cached_tokens,
        num_retractions=generation.num_retractions,
        server=generation.server,
    )


def unpack_generation(packed: PackedGeneration) -> Generation:
    """Return the generation; raises `InvariantError` when its parts contradict each other."""
    ids = bytes_ids(packed.output_ids)
    return Generation(
        output_ids=ids,
        output_logprobs=_bytes_floats(packed.output_logprobs, len(ids)),
        spans=_unpack_spans(packed.spans, len(ids)),
        stop_reason=packed.stop_reason,
        matched_stop=packed.matched_stop,
        cached_tokens=packed.cached_tokens,
        num_retractions=packed.num_retractions,
        server=packed.server,
    )


def pack_turn(turn: Turn) -> PackedTurn:
    """Return `turn` as a part of a message."""
    conversation = {"message": turn.message, "messages": turn.messages, "tools": turn.tools}
    return PackedTurn(
        context_ids=ids_bytes(turn.context_ids),
        output_ids=ids_bytes(turn.output_ids),
        output_logprobs=_float_bytes(turn.output_logprobs),
        spans=_pack_spans(turn.spans),
        stop_reason=turn.stop_reason,
        reward=_plain_float(turn.reward),
        role=turn.role,
        player=turn.player,
        branch=turn.branch,
        sent_after=turn.sent_after,
        sent_at=turn.sent_at,
        rewarded_at=turn.rewarded_at,
        parent=turn.parent,
        temperature=turn.temperature,
        fork=turn.fork,
        kept_thinking=turn.kept_thinking,
        prompt_digest=turn.prompt_digest,
        conversation=encode_line(conversation),
        started_s=turn.started_s,
        ended_s=turn.ended_s,
    )


def unpack_turn(packed: PackedTurn, clock_offset_s: float = 0.0) -> Turn:
    """Return the turn, its times `clock_offset_s` later.

    Raises:
        InvariantError: its parts contradict each other.
    """
    ids = bytes_ids(packed.output_ids)
    try:
        conversation = msgspec.json.decode(packed.conversation, type=_Conversation)
    except msgspec.DecodeError as error:
        raise InvariantError(f"a rollout worker sent a turn whose messages are not messages: {error}") from error
    return Turn(
        context_ids=bytes_ids(packed.context_ids),
        output_ids=ids,
        output_logprobs=_bytes_floats(packed.output_logprobs, len(ids)),
        spans=_unpack_spans(packed.spans, len(ids)),
        stop_reason=packed.stop_reason,
        reward=packed.reward,
        role=packed.role,
        player=packed.player,
        branch=packed.branch,
        sent_after=packed.sent_after,
        sent_at=packed.sent_at,
        rewarded_at=packed.rewarded_at,
        parent=packed.parent,
        message=conversation.message,
        temperature=packed.temperature,
        fork=packed.fork,
        kept_thinking=packed.kept_thinking,
        prompt_digest=packed.prompt_digest,
        messages=cast("tuple[Message, ...]", conversation.messages),
        tools=conversation.tools,
        started_s=_later(packed.started_s, clock_offset_s),
        ended_s=_later(packed.ended_s, clock_offset_s),
    )


def pack_trajectory(trajectory: Trajectory) -> PackedTrajectory:
    """Return `trajectory`, without its task, as a part of a message."""
    return PackedTrajectory(
        episode_id=trajectory.episode_id,
        task_id=trajectory.task_id,
        turns=tuple(map(pack_turn, trajectory.turns)),
        stop_reason=trajectory.stop_reason,
        final_reward=_plain_float(trajectory.final_reward),
        advantage=trajectory.advantage,
        failure=_pack_failure(trajectory.failure),
        metrics=_pack_metrics(trajectory.metrics),
        reward_parts=_pack_metrics(trajectory.reward_parts),
        turn_reward_parts=_pack_metrics(trajectory.turn_reward_parts),
        answer=trajectory.answer,
        started_s=trajectory.started_s,
        ended_s=trajectory.ended_s,
    )


def unpack_trajectory(packed: PackedTrajectory, task: Task, clock_offset_s: float = 0.0) -> Trajectory:
    """Return the trajectory of an episode of `task`, its times `clock_offset_s` later.

    Raises:
        InvariantError: its parts contradict each other.
    """
    return Trajectory(
        episode_id=packed.episode_id,
        task_id=packed.task_id,
        turns=tuple(unpack_turn(turn, clock_offset_s) for turn in packed.turns),
        stop_reason=packed.stop_reason,
        final_reward=packed.final_reward,
        advantage=packed.advantage,
        failure=_unpack_failure(packed.failure),
        metrics=packed.metrics,
        reward_parts=packed.reward_parts,
        turn_reward_parts=packed.turn_reward_parts,
        answer=packed.answer,
        task=task,
        started_s=_later(packed.started_s, clock_offset_s),
        ended_s=_later(packed.ended_s, clock_offset_s),
    )


def pack_score(scored: Trajectory) -> PackedScore:
    """Return what the scoring of its group made of an episode."""
    return PackedScore(
        stop_reason=scored.stop_reason,
        final_reward=_plain_float(scored.final_reward),
        advantage=scored.advantage,
        failure=_pack_failure(scored.failure),
        metrics=_pack_metrics(scored.metrics),
        reward_parts=_pack_metrics(scored.reward_parts),
    )


def with_score(episode: Trajectory, packed: PackedScore) -> Trajectory:
    """Return `episode` with its score."""
    return replace(
        episode,
        stop_reason=packed.stop_reason,
        final_reward=packed.final_reward,
        advantage=packed.advantage,
        failure=_unpack_failure(packed.failure),
        metrics=packed.metrics,
        reward_parts=packed.reward_parts,
    )


def pack_task(task: Task) -> bytes:
    """Return the fields of a task as msgpack, from which `unpack_task` makes the same fields.

    Raises:
        ConfigError: a field would come back as something else, such as a tuple, which becomes a list.
    """
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


def _float_bytes(values: Float32Array) -> bytes:
    return np.ascontiguousarray(values, "<f4").tobytes()


def _bytes_floats(data: bytes, count: int) -> Float32Array:
    if len(data) != 4 * count:
        raise InvariantError(f"a rollout message has {len(data)} bytes of log-probs for {count} token ids")
    return np.frombuffer(data, "<f4").astype(np.float32, copy=False)


def _pack_spans(spans: Sequence[VersionSpan]) -> PackedSpans:
    return tuple((span.start, span.end, span.version) for span in spans)


def _unpack_spans(packed: PackedSpans, count: int) -> tuple[VersionSpan, ...]:
    at = 0
    for start, end, _ in packed:
        if start != at or end <= start:
            raise InvariantError(f"a rollout message has version spans {packed} for {count} token ids")
        at = end
    if at != count:
        raise InvariantError(f"a rollout message has version spans {packed} for {count} token ids")
    return tuple(VersionSpan(start=start, end=end, version=version) for start, end, version in packed)


def _pack_failure(failure: EpisodeFailure | None) -> PackedFailure | None:
    return None if failure is None else (failure.kind, failure.message, failure.traceback, failure.after_turn)


def _unpack_failure(packed: PackedFailure | None) -> EpisodeFailure | None:
    if packed is None:
        return None
    kind, message, traceback, after_turn = packed
    return EpisodeFailure(kind=kind, message=message, traceback=traceback, after_turn=after_turn)


def _pack_metrics(metrics: Mapping[str, float]) -> dict[str, float]:
    return {name: float(value) for name, value in metrics.items()}


def _plain_float(value: float | None) -> float | None:
    """Return a plain float for what may be a number of numpy."""
    return None if value is None else float(value)


def _later(moment_s: float | None, offset_s: float) -> float | None:
    return None if moment_s is None else moment_s + offset_s


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
