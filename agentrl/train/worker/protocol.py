"""Requests and replies between the driver and a trainer worker, as length-prefixed msgpack over a pair of byte streams.

Invariant: every frame decodes into exactly one of the declared types or is refused; arrays travel as little-endian bytes
with a declared type, and every length is checked before it is used. Nothing that is read can run code.

A frame is 8 bytes, the little-endian length of the body, and the body.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias

import msgspec
import numpy as np

from agentrl.errors import InvariantError
from agentrl.types import BoolArray, Float32Array, Int32Array
from agentrl.weights.types import GroupAddress, GroupRequest, Manifest

HEADER_BYTES = 8
MAX_FRAME_BYTES = 1 << 30
"""Largest body: about 40 million tokens of a training batch."""


class Array(msgspec.Struct, frozen=True, array_like=True):
    """A flat array on the wire."""

    dtype: Literal["<i4", "<f4", "|b1"]
    data: bytes


class Setup(msgspec.Struct, frozen=True, tag=True):
    """Load the model; the first request, answered by `Ready`."""

    model_path: str
    trainer: str
    """`TrainerConfig` as JSON."""
    algorithm: str
    """`AlgorithmConfig` as JSON."""
    sync: str
    """`SyncConfig` as JSON."""
    total_steps: int
    """Batches of the whole run; the learning-rate schedule ends there."""
    seed: int


class TrainStep(msgspec.Struct, frozen=True, tag=True):
    """Train on one batch; answered by `Stepped`. The arrays are the samples' own, joined; `lengths` cuts them apart."""

    policy_version: int
    lengths: Array
    token_ids: Array
    loss_mask: Array
    behavior_logprobs: Array
    token_versions: Array
    turn_index: Array
    temperatures: Array
    advantages: Array


class Publish(msgspec.Struct, frozen=True, tag=True):
    """Write the weights for the servers; answered by `Published`."""

    version: int
    directory: str


class Logprobs(msgspec.Struct, frozen=True, tag=True):
    """Log-probs of whole sequences; answered by `LogprobsReply`."""

    lengths: Array
    token_ids: Array


class Save(msgspec.Struct, frozen=True, tag=True):
    """Write a checkpoint; answered by `Saved`."""

    directory: str
    note: str = ""


class Restore(msgspec.Struct, frozen=True, tag=True):
    """Load a checkpoint; answered by `Restored`."""

    directory: str


class OpenGroups(msgspec.Struct, frozen=True, tag=True):
    """Listen for servers, and close the groups that are not kept; answered by `GroupsOpened`."""

    requests: tuple[GroupRequest, ...]
    keep: tuple[str, ...]


class BeginSending(msgspec.Struct, frozen=True, tag=True):
    """Hold the weights still as `version` and make ready to send them; answered by `SendingBegun`."""

    version: int
    groups: tuple[str, ...]
    dtype: str
    digests: bool
    again: bool
    """Refuse unless the weights are those that were sent or written as `version`."""


class StartSending(msgspec.Struct, frozen=True, tag=True):
    """Send to these groups, whose servers receive now; answered by `SendingStarted`."""

    groups: tuple[str, ...]


class FinishSending(msgspec.Struct, frozen=True, tag=True):
    """Close the abandoned groups, wait for the others, let the weights change again; answered by `SendingFinished`."""

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


class Published(msgspec.Struct, frozen=True, tag=True):
    """The weights are on the disk."""

    version: int
    path: str
    checksum: str
    tensor_checksums: dict[str, str]


class LogprobsReply(msgspec.Struct, frozen=True, tag=True):
    """The joined log-probs, one fewer per sequence than its tokens."""

    logprobs: Array


class Saved(msgspec.Struct, frozen=True, tag=True):
    """The checkpoint is on the disk."""


class Restored(msgspec.Struct, frozen=True, tag=True):
    """The worker goes on where the checkpoint was written."""

    policy_version: int
    steps: int
    note: str


class GroupsOpened(msgspec.Struct, frozen=True, tag=True):
    """Servers can join."""

    addresses: tuple[GroupAddress, ...]


class SendingBegun(msgspec.Struct, frozen=True, tag=True):
    """The weights stand still."""

    manifest: Manifest


class SendingStarted(msgspec.Struct, frozen=True, tag=True):
    """They are on their way."""


class SendingFinished(msgspec.Struct, frozen=True, tag=True):
    """They have left, or failed to."""

    failures: dict[str, str]
    """What went wrong, by group."""


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The request was refused or failed; the worker can answer others."""

    kind: str
    """Name of a class in `agentrl.errors`."""
    message: str


WorkerRequest: TypeAlias = (
    Setup | TrainStep | Publish | Logprobs | Save | Restore | OpenGroups | BeginSending | StartSending | FinishSending
)
WorkerReply: TypeAlias = (
    Ready
    | Stepped
    | Published
    | LogprobsReply
    | Saved
    | Restored
    | GroupsOpened
    | SendingBegun
    | SendingStarted
    | SendingFinished
    | Failed
)

_REQUESTS: msgspec.msgpack.Decoder[WorkerRequest] = msgspec.msgpack.Decoder(WorkerRequest)
_REPLIES: msgspec.msgpack.Decoder[WorkerReply] = msgspec.msgpack.Decoder(WorkerReply)


def encode_frame(message: WorkerRequest | WorkerReply) -> bytes:
    """Return `message` as a frame.

    Raises:
        InvariantError: when the body is longer than `MAX_FRAME_BYTES`.
    """
    body = msgspec.msgpack.encode(message)
    if len(body) > MAX_FRAME_BYTES:
        raise InvariantError(
            f"{type(message).__name__} of {len(body)} bytes; at most {MAX_FRAME_BYTES} fit one message: use smaller batches"
        )
    return len(body).to_bytes(HEADER_BYTES, "little") + body


def body_length(header: bytes | bytearray) -> int:
    """Return the length of the body that follows an 8-byte `header`.

    Raises:
        InvariantError: when it is over the limit: the stream is not one of frames.
    """
    length = int.from_bytes(header, "little")
    if length > MAX_FRAME_BYTES:
        raise InvariantError(f"a frame of {length} bytes was announced, at most {MAX_FRAME_BYTES} are allowed")
    return length


def decode_request(body: bytes | bytearray) -> WorkerRequest:
    """Return the request in `body`.

    Raises:
        InvariantError: when it is not one.
    """
    try:
        return _REQUESTS.decode(body)
    except msgspec.DecodeError as error:
        raise InvariantError(f"not a request to the trainer worker: {error}") from error


def decode_reply(body: bytes | bytearray) -> WorkerReply:
    """Return the reply in `body`.

    Raises:
        InvariantError: when it is not one.
    """
    try:
        return _REPLIES.decode(body)
    except msgspec.DecodeError as error:
        raise InvariantError(f"not a reply of the trainer worker: {error}") from error


def pack_int32(values: Sequence[int] | Int32Array) -> Array:
    """Return int32 values for the wire."""
    return Array("<i4", np.ascontiguousarray(values, "<i4").tobytes())


def pack_float32(values: Float32Array) -> Array:
    """Return float32 values for the wire."""
    return Array("<f4", np.ascontiguousarray(values, "<f4").tobytes())


def pack_bool(values: BoolArray) -> Array:
    """Return booleans for the wire."""
    return Array("|b1", np.ascontiguousarray(values, np.bool_).tobytes())


def unpack_int32(array: Array, count: int | None = None) -> Int32Array:
    """Return the int32 values of `array`, [count]; raises InvariantError for another type or count."""
    return np.frombuffer(_array_bytes(array, "<i4", 4, count), "<i4").astype(np.int32, copy=False)


def unpack_float32(array: Array, count: int | None = None) -> Float32Array:
    """Return the float32 values of `array`, [count]; raises InvariantError for another type or count."""
    return np.frombuffer(_array_bytes(array, "<f4", 4, count), "<f4").astype(np.float32, copy=False)


def unpack_bool(array: Array, count: int | None = None) -> BoolArray:
    """Return the booleans of `array`, [count]; raises InvariantError for another type or count."""
    data = _array_bytes(array, "|b1", 1, count)
    return np.frombuffer(data, np.uint8) != 0


def _array_bytes(array: Array, dtype: str, item_bytes: int, count: int | None) -> bytes:
    if array.dtype != dtype:
        raise InvariantError(f"expected an array of {dtype}, got {array.dtype}")
    if len(array.data) % item_bytes or (count is not None and len(array.data) != count * item_bytes):
        wanted = "whole elements" if count is None else f"{count} elements"
        raise InvariantError(f"expected {wanted} of {dtype}, got {len(array.data)} bytes")
    return array.data
