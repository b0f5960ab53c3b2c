"""Messages between the driver and a rollout worker, as msgpack in frames.

Invariant: a body decodes into exactly one of the declared messages or is refused. Nothing that is read can run code.
`agentrl.episode.codec` packs turns and trajectories. Unpacking what was packed gives the same arrays, bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias, cast

import msgspec
import numpy as np

from agentrl.episode.checks import check_spans
from agentrl.episode.codec import unpacked
from agentrl.errors import ConfigError, InvariantError, WorkflowError
from agentrl.inference.backend import Context, Generation
from agentrl.processes.frames import decoded
from agentrl.types import Int32Array, Task, ToolFormatName

MAX_MESSAGE_BYTES = 1 << 28
"""Largest body: a trajectory of about 20 million tokens."""


class WorkerSetup(msgspec.Struct, frozen=True, tag=True):
    """Load workflow and tokenizer; the first message to a worker, answered by `WorkerReady` or `WorkerRefused`."""

    name: str
    """Of the worker, in messages."""
    directory: str
    """Working directory, from which the workflow is imported."""
    workflow: str
    """`module:Name`."""
    workflow_args: str
    """JSON."""
    model: str
    """Directory of the tokenizer and the chat template."""
    template_options: str
    """JSON."""
    max_context: int | None
    """Longest context that the servers grant, tokens."""
    rollout: str
    """`RolloutConfig` as JSON."""
    seed: int | None
    stall_timeout_s: float
    """Seconds that code may block the worker's event loop, after which the worker ends."""
    tool_format: ToolFormatName = "auto"
    max_message_bytes: int = MAX_MESSAGE_BYTES
    """Longest message about an episode, in either direction; a longer one fails its episode."""


class StartEpisode(msgspec.Struct, frozen=True, tag=True):
    """Play an episode; answered by a `TurnRecorded` for each turn, and at the end by one message.

    That is `EpisodeEnded`, `EpisodeRaised` or `EpisodeCancelled`.
    """

    number: int
    """Of the episode, among all that this worker gets."""
    episode_id: str
    task_id: str
    task: bytes
    """The fields of the task, msgpack."""
    sampling: str
    """`SamplingConfig` as JSON."""


class ScoreGroup(msgspec.Struct, frozen=True, tag=True):
    """Score the episodes of a group together; answered by `GroupScored`, `EpisodeRaised` or `EpisodeCancelled`."""

    number: int
    """Counted together with the episodes."""
    task_id: str
    task: bytes
    """The fields of the task, msgpack."""
    episodes: tuple[msgspec.Raw, ...]


class CancelEpisode(msgspec.Struct, frozen=True, tag=True):
    """Cancel an episode, or the scoring of a group; one that has ended is past it."""

    number: int


class CallAnswered(msgspec.Struct, frozen=True, tag=True):
    """The completion of a model call; the last message about it."""

    call: int
    new_ids: bytes
    """Of a streamed call: the ids since the last piece."""
    generation: msgspec.Raw


class CallPiece(msgspec.Struct, frozen=True, tag=True):
    """The ids that a streamed call has sampled since the last piece."""

    call: int
    output_ids: bytes


class CallFailed(msgspec.Struct, frozen=True, tag=True):
    """The error of a model call; the last message about it."""

    call: int
    kind: str
    """Name of a class in `agentrl.errors`."""
    message: str
    status: int | None = None
    url: str | None = None
    retry_after_s: float | None = None


class WorkerReady(msgspec.Struct, frozen=True, tag=True):
    """The worker takes episodes."""

    clock_s: float
    """Its `time.perf_counter` at this moment."""


class WorkerRefused(msgspec.Struct, frozen=True, tag=True):
    """The worker cannot be set up, and ends."""

    kind: str
    """Name of a class in `agentrl.errors`."""
    message: str


class WorkerLogged(msgspec.Struct, frozen=True, tag=True):
    """A warning of agentrl in the worker, such as the name of code that blocks its event loop."""

    level: int
    """Of `logging`."""
    text: str


class ModelCall(msgspec.Struct, frozen=True, tag=True):
    """A model call of an episode; answered by `CallAnswered` or `CallFailed`, a streamed one by pieces before that."""

    call: int
    """Number of the call, among all of this worker."""
    request_id: str
    episode_id: str
    context: Context
    sampling: str
    """`SamplingParams` as JSON."""
    streamed: bool


class AbortCall(msgspec.Struct, frozen=True, tag=True):
    """Abort a model call, whose answer nothing waits for any more; one that has ended is past it."""

    call: int


class GiveUpCall(msgspec.Struct, frozen=True, tag=True):
    """End a model call early, which is still answered, with the tokens it has; one that has ended is past it."""

    call: int


class TurnRecorded(msgspec.Struct, frozen=True, tag=True):
    """An episode has one more turn."""

    number: int
    turn: msgspec.Raw


class EpisodeEnded(msgspec.Struct, frozen=True, tag=True):
    """An episode has ended as a trajectory, which may be a failure."""

    number: int
    trajectory: msgspec.Raw


class GroupScored(msgspec.Struct, frozen=True, tag=True):
    """The episodes of a group have their scores, or have failed together."""

    number: int
    scores: tuple[msgspec.Raw, ...]
    """One for each episode, in order."""


class EpisodeRaised(msgspec.Struct, frozen=True, tag=True):
    """An episode, or the scoring of a group, met an error that ends the run."""

    number: int
    kind: str
    """Name of a class in `agentrl.errors`."""
    message: str


class EpisodeCancelled(msgspec.Struct, frozen=True, tag=True):
    """A cancelled episode, or scoring of a group, has ended."""

    number: int


ToWorker: TypeAlias = WorkerSetup | StartEpisode | ScoreGroup | CancelEpisode | CallAnswered | CallPiece | CallFailed
ToDriver: TypeAlias = (
    WorkerReady
    | WorkerRefused
    | WorkerLogged
    | ModelCall
    | AbortCall
    | GiveUpCall
    | TurnRecorded
    | EpisodeEnded
    | GroupScored
    | EpisodeRaised
    | EpisodeCancelled
)

_TO_WORKER: msgspec.msgpack.Decoder[ToWorker] = msgspec.msgpack.Decoder(ToWorker)
_TO_DRIVER: msgspec.msgpack.Decoder[ToDriver] = msgspec.msgpack.Decoder(ToDriver)


def encode_message(message: ToWorker | ToDriver, max_bytes: int = MAX_MESSAGE_BYTES) -> bytes:
    """Return `message` as the body of a frame; raises WorkflowError where it is longer than `max_bytes`."""
    body = msgspec.msgpack.encode(message)
    if len(body) > max_bytes:
        raise WorkflowError(
            f"{type(message).__name__} has {len(body)} bytes, but a message between driver and rollout worker may have at "
            f"most {max_bytes}; make tasks, messages and episodes smaller, or set rollout.runner: local"
        )
    return body


def read_to_worker(body: bytes) -> ToWorker:
    """Return the driver's message in `body`; raises InvariantError when it is none."""
    return decoded(_TO_WORKER, body, "a message to a rollout worker")


def read_to_driver(body: bytes) -> ToDriver:
    """Return the worker's message in `body`; raises InvariantError when it is none."""
    return decoded(_TO_DRIVER, body, "a message of a rollout worker")


def unpack_generation(message: msgspec.Raw) -> Generation:
    """Return the generation; raises `InvariantError` when its parts contradict each other."""
    generation = unpacked(message, Generation)
    if len(generation.output_logprobs) != len(generation.output_ids):
        raise InvariantError(
            f"a rollout message has {len(generation.output_logprobs)} log-probs for {len(generation.output_ids)} token ids"
        )
    check_spans(generation.spans, len(generation.output_ids), None, "a rollout message")
    return generation


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
