"""Requests and replies between the driver and a trainer worker: msgpack in frames.

Invariant: a body decodes into a number and one of the declared types, or is refused. A reply carries the number of its
request, so that several can be under way.
"""

from __future__ import annotations

from typing import Literal, TypeAlias, TypeVar

import msgspec
import numpy as np

from agentrl.errors import InvariantError
from agentrl.processes.frames import MAX_BODY_BYTES, decoded
from agentrl.weights.types import GroupAddress, GroupRequest, Manifest

Scalar = TypeVar("Scalar", bound=np.generic)

MAX_LAST_WORDS = 65_536
"""Largest body with which a rank other than 0 tells how it fails."""


class Array(msgspec.Struct, frozen=True, array_like=True):
    """A flat array on the wire."""

    dtype: Literal["<i4", "<f4", "|b1"]
    data: bytes


class Setup(msgspec.Struct, frozen=True, tag=True):
    """Load the model; the first request, answered by `Ready`."""

    model_path: str
    trainer: str
    algorithm: str
    sync: str
    total_steps: int
    """Batches of the whole run; the learning-rate schedule ends there."""
    seed: int


class TrainStep(msgspec.Struct, frozen=True, tag=True):
    """Train on one batch; answered by `Stepped`. Each array joins those of all samples; `lengths` separates them again."""

    policy_version: int
    lengths: Array
    token_ids: Array
    loss_mask: Array
    behavior_logprobs: Array
    token_versions: Array
    turn_index: Array
    temperatures: Array
    advantages: Array


class HoldWeights(msgspec.Struct, frozen=True, tag=True):
    """Hold the present weights as `version`, to be sent or written; answered by `WeightsHeld`."""

    version: int
    dtype: str | None
    """Type in which they are sent; None: as they are trained."""
    again: bool
    """Refuse unless the present weights were held as `version` before."""


class Publish(msgspec.Struct, frozen=True, tag=True):
    """Write the weights that are held as `version` for the servers; answered by `Published`."""

    version: int
    directory: str


class Logprobs(msgspec.Struct, frozen=True, tag=True):
    """Log-probs of whole sequences; answered by `LogprobsReply`."""

    lengths: Array
    token_ids: Array
    temperatures: Array


class Save(msgspec.Struct, frozen=True, tag=True):
    """Copy what a checkpoint needs, and begin to write it; answered by `SaveBegun`."""

    directory: str
    note: str = ""


class FinishSave(msgspec.Struct, frozen=True, tag=True):
    """Report on the checkpoint that is being written; answered by `Saved`."""

    wait: bool
    """Until it is on the disk."""


class Restore(msgspec.Struct, frozen=True, tag=True):
    """Load a checkpoint; answered by `Restored`."""

    directory: str


class OpenGroups(msgspec.Struct, frozen=True, tag=True):
    """Close groups, and listen for servers; answered by `GroupsOpened`."""

    requests: tuple[GroupRequest, ...]
    close: tuple[str, ...]


class BeginSending(msgspec.Struct, frozen=True, tag=True):
    """Prepare to send the weights that are held as `version`; answered by `SendingBegun`."""

    version: int
    groups: tuple[str, ...]


class StartSending(msgspec.Struct, frozen=True, tag=True):
    """Send to these groups, whose servers are receiving; answered by `SendingStarted`."""

    groups: tuple[str, ...]


class FinishSending(msgspec.Struct, frozen=True, tag=True):
    """Close the abandoned ones of `groups` and wait for the others; answered by `SendingFinished`."""

    groups: tuple[str, ...]
    abandoned: tuple[str, ...]


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The model is loaded."""

    device: str
    num_parameters: int
    vocab_size: int


class Stepped(msgspec.Struct, frozen=True, tag=True):
    """The step is done."""

    metrics: dict[str, float]
    skipped: str | None
    samples: Array
    """Places in the batch of the samples that have proximal log-probs."""
    lengths: Array
    """Number of log-probs of each."""
    proximal_logprobs: Array
    """All of them, joined."""


class WeightsHeld(msgspec.Struct, frozen=True, tag=True):
    """The weights can be sent or written."""

    snapshot: bool
    """Whether they are a copy, which stays while the trainer steps."""
    num_bytes: int
    """Size of that copy, or what it would be."""
    free_bytes: int | None
    """Memory of the machine that was free when the worker decided; None: it did not ask, or does not know."""
    in_file: bool = False
    """Whether the copy is in a file and not in host memory."""


class Published(msgspec.Struct, frozen=True, tag=True):
    """The weights are on the disk."""

    version: int
    path: str
    checksum: str
    tensor_checksums: dict[str, str]


class LogprobsReply(msgspec.Struct, frozen=True, tag=True):
    """The joined log-probs; a sequence of L tokens has L-1."""

    logprobs: Array


class SaveBegun(msgspec.Struct, frozen=True, tag=True):
    """The state is copied; a thread writes the checkpoint."""


class Saved(msgspec.Struct, frozen=True, tag=True):
    """The checkpoint is on the disk."""

    directory: str | None
    """None: nothing was begun since the last report, or it is still being written."""
    seconds: float


class Restored(msgspec.Struct, frozen=True, tag=True):
    """The worker continues where the checkpoint was written."""

    policy_version: int
    steps: int
    note: str


class GroupsOpened(msgspec.Struct, frozen=True, tag=True):
    """Servers can join."""

    addresses: tuple[GroupAddress, ...]


class SendingBegun(msgspec.Struct, frozen=True, tag=True):
    """The groups are prepared."""

    manifest: Manifest


class SendingStarted(msgspec.Struct, frozen=True, tag=True):
    """The sender threads are sending."""


class SendingFinished(msgspec.Struct, frozen=True, tag=True):
    """Every group has received the weights or is listed as failed."""

    failures: dict[str, str]


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The request was refused or failed; the worker still answers requests."""

    kind: str
    """Name of a class in `agentrl.errors`."""
    message: str


SendingRequest: TypeAlias = OpenGroups | BeginSending | StartSending | FinishSending | Publish
"""Requests that rank 0 answers alone and at once, also while the ranks work on another one."""
WorkerRequest: TypeAlias = Setup | TrainStep | Logprobs | Save | FinishSave | Restore | HoldWeights | SendingRequest
WorkerReply: TypeAlias = (
    Ready
    | Stepped
    | WeightsHeld
    | Published
    | LogprobsReply
    | SaveBegun
    | Saved
    | Restored
    | GroupsOpened
    | SendingBegun
    | SendingStarted
    | SendingFinished
    | Failed
)

_REQUESTS: msgspec.msgpack.Decoder[tuple[int, WorkerRequest]] = msgspec.msgpack.Decoder(tuple[int, WorkerRequest])
_REPLIES: msgspec.msgpack.Decoder[tuple[int, WorkerReply]] = msgspec.msgpack.Decoder(tuple[int, WorkerReply])


def encode(message: WorkerRequest | WorkerReply, number: int = 0) -> bytes:
    """Return `message` of the request `number` as the body of a frame; raises InvariantError where it is too long."""
    body = msgspec.msgpack.encode((number, message))
    if len(body) > MAX_BODY_BYTES:
        raise InvariantError(
            f"{type(message).__name__} has {len(body)} bytes, but a message may have {MAX_BODY_BYTES}; use smaller batches"
        )
    return body


def decode_request(body: bytes) -> tuple[int, WorkerRequest]:
    """Return the request in `body` and its number; raises InvariantError where it is none."""
    return decoded(_REQUESTS, body, "a request to the trainer worker")


def decode_reply(body: bytes) -> tuple[int, WorkerReply]:
    """Return the reply in `body` and the number of its request; raises InvariantError where it is none."""
    return decoded(_REPLIES, body, "a reply of the trainer worker")
