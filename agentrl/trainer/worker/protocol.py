"""Requests and replies between the driver and a trainer worker, msgpack in frames; batches, reports and log-probs as those.

Invariant: a body decodes into a number and one of the declared types, or is refused. A reply carries the number of its
request, so that several can be under way. Unpacking what was packed gives the same, bit for bit: arrays travel as
little-endian bytes with a declared type, and each length is checked before use.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from agentrl.errors import InvariantError
from agentrl.processes.frames import MAX_BODY_BYTES, decoded
from agentrl.trainer.base import StepReport, TrainBatch, TrainSample
from agentrl.types import BoolArray, Float32Array, Int32Array, Sample
from agentrl.weights.types import GroupAddress, GroupRequest, Manifest

Scalar = TypeVar("Scalar", bound=np.generic)

MAX_LAST_WORDS = 65_536
"""Largest body with which a rank other than 0 tells how it fails."""


NumbersOf: TypeAlias = Literal["policy", "critic", "reference"]
"""The model whose numbers are asked for."""


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
    """Train on one batch; answered by `Stepped`. Each array concatenates all samples; `lengths` splits it again."""

    policy_version: int
    lengths: Array
    token_ids: Array
    loss_mask: Array
    behavior_logprobs: Array
    token_versions: Array
    turn_index: Array
    temperatures: Array
    advantages: Array
    role_index: Array
    player_index: Array
    groups: Array
    """One for each sample."""
    returns: Array
    """One for each sample."""
    roles: tuple[str, ...]
    players: tuple[str, ...]
    values: Array | None = None
    """None where there is no critic, as `value_targets`."""
    value_targets: Array | None = None


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
    """Numbers for tokens 1.. of whole sequences: log-probs, or a critic's values; answered by `LogprobsReply`."""

    lengths: Array
    token_ids: Array
    temperatures: Array
    """One for each token."""
    of: NumbersOf = "policy"


class Save(msgspec.Struct, frozen=True, tag=True):
    """Copy the state for a checkpoint, and begin to write it; answered by `SaveBegun`."""

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
    """Size of the copy, whether it was made or not."""
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
    adapter: bool = False


class LogprobsReply(msgspec.Struct, frozen=True, tag=True):
    """The joined numbers; a sequence of L tokens has L-1."""

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


def pack_batch(batch: TrainBatch) -> TrainStep:
    """Return `batch` as a request; raises InvariantError where the arrays of a sample differ in length."""
    samples = [item.sample for item in batch.samples]
    for index, item in enumerate(batch.samples):
        sample, length = item.sample, len(item.sample.token_ids)
        arrays = (sample.loss_mask, sample.behavior_logprobs, sample.token_versions, sample.turn_index, sample.temperatures)
        mine = (item.advantages, item.roles, item.players, item.values, item.value_targets)
        own = [array for array in mine if array is not None]
        if any(len(array) != length for array in (*arrays, *own)):
            raise InvariantError(f"sample {index} of {length} tokens has arrays of lengths {[*map(len, (*arrays, *own))]}")
    return TrainStep(
        policy_version=batch.policy_version,
        lengths=pack_int32([len(sample.token_ids) for sample in samples]),
        token_ids=pack_int32(_join_arrays([sample.token_ids for sample in samples], np.int32)),
        loss_mask=pack_bool(_join_arrays([sample.loss_mask for sample in samples], np.bool_)),
        behavior_logprobs=pack_float32(_join_arrays([sample.behavior_logprobs for sample in samples], np.float32)),
        token_versions=pack_int32(_join_arrays([sample.token_versions for sample in samples], np.int32)),
        turn_index=pack_int32(_join_arrays([sample.turn_index for sample in samples], np.int32)),
        temperatures=pack_float32(_join_arrays([sample.temperatures for sample in samples], np.float32)),
        advantages=pack_float32(_join_arrays([item.advantages for item in batch.samples], np.float32)),
        role_index=pack_int32(_join_arrays([_indices(item, item.roles) for item in batch.samples], np.int32)),
        player_index=pack_int32(_join_arrays([_indices(item, item.players) for item in batch.samples], np.int32)),
        groups=pack_int32([item.group for item in batch.samples]),
        returns=pack_float32(np.array([item.episode_return for item in batch.samples], np.float32)),
        roles=batch.roles,
        players=batch.players,
        values=_pack_optional([item.values for item in batch.samples]),
        value_targets=_pack_optional([item.value_targets for item in batch.samples]),
    )


def _pack_optional(arrays: Sequence[Float32Array | None]) -> Array | None:
    present = [each for each in arrays if each is not None]
    if present and len(present) != len(arrays):
        raise InvariantError(
            f"{len(arrays) - len(present)} of {len(arrays)} samples have no values or targets of the critic"
        )
    return pack_float32(_join_arrays(present, np.float32)) if present else None


def _indices(item: TrainSample, given: Int32Array | None) -> Int32Array:
    return np.zeros(len(item.sample.token_ids), np.int32) if given is None else given


def pack_report(report: StepReport) -> Stepped:
    """Return `report` as a reply."""
    proximal = report.proximal_logprobs
    return Stepped(
        metrics=dict(report.metrics),
        skipped=report.skipped,
        samples=pack_int32(list(proximal)),
        lengths=pack_int32([len(values) for values in proximal.values()]),
        proximal_logprobs=pack_float32(_join_arrays(list(proximal.values()), np.float32)),
    )


def unpack_report(reply: Stepped) -> StepReport:
    """Return the report that was packed into `reply`; raises InvariantError when its lengths contradict its arrays."""
    lengths = _lengths(reply.lengths)
    values = unpack_float32(reply.proximal_logprobs, int(lengths.sum()))
    places = unpack_int32(reply.samples, len(lengths)).tolist()
    proximal = {place: values[at] for place, at in zip(places, _slices(lengths), strict=True)}
    return StepReport(metrics=reply.metrics, skipped=reply.skipped, proximal_logprobs=proximal)


def pack_sequences(
    sequences: Sequence[Int32Array],
    temperatures: Sequence[float] | Sequence[Float32Array] | None = None,
    of: NumbersOf = "policy",
) -> Logprobs:
    """Return a request for numbers of `sequences`; `temperatures` has one or [L] for each, and None means 1."""
    divisor_of_sequence = [1.0] * len(sequences) if temperatures is None else temperatures
    divisors = [np.full(len(ids), divisor, np.float32) for ids, divisor in zip(sequences, divisor_of_sequence, strict=True)]
    return Logprobs(
        lengths=pack_int32([len(ids) for ids in sequences]),
        token_ids=pack_int32(_join_arrays(sequences, np.int32)),
        temperatures=pack_float32(_join_arrays(divisors, np.float32)),
        of=of,
    )


def unpack_batch(step: TrainStep) -> TrainBatch:
    """Return the packed batch, bit for bit; raises InvariantError where arrays do not have the declared lengths."""
    lengths = _lengths(step.lengths)
    count = int(lengths.sum())
    ids, versions = unpack_int32(step.token_ids, count), unpack_int32(step.token_versions, count)
    mask, turn_index = unpack_bool(step.loss_mask, count), unpack_int32(step.turn_index, count)
    behavior, temperatures = unpack_float32(step.behavior_logprobs, count), unpack_float32(step.temperatures, count)
    advantages = unpack_float32(step.advantages, count)
    roles, players = unpack_int32(step.role_index, count), unpack_int32(step.player_index, count)
    groups = unpack_int32(step.groups, len(lengths)).tolist()
    returns = unpack_float32(step.returns, len(lengths)).tolist()
    values = None if step.values is None else unpack_float32(step.values, count)
    targets = None if step.value_targets is None else unpack_float32(step.value_targets, count)
    samples: list[TrainSample] = []
    for at, group, episode_return in zip(_slices(lengths), groups, returns, strict=True):
        sample = Sample(
            token_ids=ids[at],
            loss_mask=mask[at],
            behavior_logprobs=behavior[at],
            token_versions=versions[at],
            turn_index=turn_index[at],
            temperatures=temperatures[at],
        )
        samples.append(
            TrainSample(
                sample=sample,
                advantages=advantages[at],
                group=group,
                episode_return=episode_return,
                roles=roles[at],
                players=players[at],
                values=None if values is None else values[at],
                value_targets=None if targets is None else targets[at],
            )
        )
    return TrainBatch(samples=tuple(samples), policy_version=step.policy_version, roles=step.roles, players=step.players)


def unpack_sequences(request: Logprobs) -> tuple[list[Int32Array], list[Float32Array]]:
    """Return the sequences and their tokens' temperatures; raises InvariantError when the lengths contradict the arrays."""
    lengths = _lengths(request.lengths)
    count, slices = int(lengths.sum()), _slices(lengths)
    ids, temperatures = unpack_int32(request.token_ids, count), unpack_float32(request.temperatures, count)
    return [ids[at] for at in slices], [temperatures[at] for at in slices]


def split_logprobs(reply: LogprobsReply, sequences: Sequence[Int32Array]) -> list[Float32Array]:
    """Return the log-probs of each of `sequences`; raises InvariantError when the reply has another number of them."""
    counts = np.array([max(0, len(ids) - 1) for ids in sequences], np.int64)
    values = unpack_float32(reply.logprobs, int(counts.sum()))
    return [values[at] for at in _slices(counts)]


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


def _join_arrays(arrays: Sequence[NDArray[Scalar]], dtype: type[Scalar]) -> NDArray[Scalar]:
    return np.concatenate(arrays) if arrays else np.empty(0, dtype)


def _lengths(array: Array) -> NDArray[np.int64]:
    lengths = unpack_int32(array).astype(np.int64)
    if len(lengths) and int(lengths.min()) < 0:
        raise InvariantError(f"negative length {int(lengths.min())} in a request to the trainer worker")
    return lengths


def _slices(lengths: NDArray[np.int64]) -> list[slice]:
    ends = np.cumsum(lengths).tolist()
    return [slice(end - length, end) for end, length in zip(ends, lengths.tolist(), strict=True)]
