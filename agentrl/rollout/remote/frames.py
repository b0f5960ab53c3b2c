"""Messages between the driver and a rollout worker, as msgpack in frames.

Invariant: a body decodes into exactly one of the declared messages or is refused. Nothing that is read can run code.
`agentrl.episode.codec` packs turns, trajectories, scores and generations, and checks them when it unpacks them.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from agentrl.errors import WorkflowError
from agentrl.inference.backend import Context
from agentrl.processes.frames import decoded

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
