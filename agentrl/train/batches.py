"""Training batches on the wire, and what a batch must be to be trained; no torch.

Invariant: unpacking what was packed gives the same batch, bit for bit; a batch that passes `check_batch` holds no trained
token over the staleness bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from agentrl.errors import InvariantError, StaleDataError
from agentrl.train.base import TrainBatch, TrainSample
from agentrl.train.worker.protocol import (
    Array,
    Logprobs,
    LogprobsReply,
    TrainStep,
    pack_bool,
    pack_float32,
    pack_int32,
    unpack_bool,
    unpack_float32,
    unpack_int32,
)
from agentrl.types import BoolArray, Float32Array, Int32Array, Sample

Scalar = TypeVar("Scalar", bound=np.generic)


def pack_batch(batch: TrainBatch) -> TrainStep:
    """Return `batch` as a request.

    Raises:
        InvariantError: when the arrays of a sample differ in length.
    """
    samples = [item.sample for item in batch.samples]
    for index, item in enumerate(batch.samples):
        sample, length = item.sample, len(item.sample.token_ids)
        arrays = (sample.loss_mask, sample.behavior_logprobs, sample.token_versions, sample.turn_index, sample.temperatures)
        if any(len(array) != length for array in (*arrays, item.advantages)):
            raise InvariantError(
                f"sample {index} of {length} tokens has arrays of lengths {[*map(len, arrays), len(item.advantages)]}"
            )
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
    )


def pack_sequences(sequences: Sequence[Int32Array]) -> Logprobs:
    """Return a request for the log-probs of `sequences`."""
    joined = _join_arrays(sequences, np.int32)
    return Logprobs(lengths=pack_int32([len(ids) for ids in sequences]), token_ids=pack_int32(joined))


def unpack_batch(step: TrainStep) -> TrainBatch:
    """Return the batch that was packed into `step`, bit for bit.

    Raises:
        InvariantError: when the arrays do not have the lengths the request declares.
    """
    lengths = _lengths(step.lengths)
    count = int(lengths.sum())
    ids, versions = unpack_int32(step.token_ids, count), unpack_int32(step.token_versions, count)
    mask, turn_index = unpack_bool(step.loss_mask, count), unpack_int32(step.turn_index, count)
    behavior, temperatures = unpack_float32(step.behavior_logprobs, count), unpack_float32(step.temperatures, count)
    advantages = unpack_float32(step.advantages, count)
    samples: list[TrainSample] = []
    for at in _slices(lengths):
        sample = Sample(
            token_ids=ids[at],
            loss_mask=mask[at],
            behavior_logprobs=behavior[at],
            token_versions=versions[at],
            turn_index=turn_index[at],
            temperatures=temperatures[at],
        )
        samples.append(TrainSample(sample=sample, advantages=advantages[at]))
    return TrainBatch(samples=tuple(samples), policy_version=step.policy_version)


def unpack_sequences(request: Logprobs) -> list[Int32Array]:
    """Return the sequences of `request`; raises InvariantError when the lengths contradict the array."""
    lengths = _lengths(request.lengths)
    ids = unpack_int32(request.token_ids, int(lengths.sum()))
    return [ids[at] for at in _slices(lengths)]


def split_logprobs(reply: LogprobsReply, sequences: Sequence[Int32Array]) -> list[Float32Array]:
    """Return the log-probs of each of `sequences`; raises InvariantError when the reply has another number of them."""
    counts = np.array([max(0, len(ids) - 1) for ids in sequences], np.int64)
    values = unpack_float32(reply.logprobs, int(counts.sum()))
    return [values[at] for at in _slices(counts)]


def has_gradient(item: TrainSample) -> bool:
    """Return whether a trained token of `item` has an advantage other than 0 (NaN counts)."""
    return bool((item.advantages[item.sample.loss_mask] != 0).any())


def interrupted(sample: Sample) -> BoolArray:
    """Return, [L] bool, which sampled tokens came after weights had changed since the first token of their turn.

    Under `inference.pause_mode: fast` they were sampled from keys and values of former weights, so that their recorded
    log-probs are not those of the version they carry. An update between a request and its first token leaves no trace here.

    Example:
        >>> arrays = {"token_ids": [5, 6, 7, 8, 9], "token_versions": [-1, 2, 3, -1, 3], "turn_index": [0, 0, 0, 1, 1]}
        >>> rest = {"loss_mask": np.ones(5, bool), "behavior_logprobs": np.zeros(5), "temperatures": np.ones(5)}
        >>> interrupted(Sample(**{name: np.array(array) for name, array in (arrays | rest).items()})).tolist()
        [False, False, True, False, False]
    """
    result = np.zeros(len(sample.token_ids), np.bool_)
    sampled = np.flatnonzero(sample.token_versions >= 0)
    if len(sampled):
        turns, versions = sample.turn_index[sampled], sample.token_versions[sampled]
        starts = np.flatnonzero(np.concatenate([[True], turns[1:] != turns[:-1]]))
        result[sampled] = versions > np.repeat(versions[starts], np.diff(starts, append=len(turns)))
    return result


def check_batch(batch: TrainBatch, max_staleness: int) -> dict[str, float]:
    """Return the staleness and token counts of `batch`.

    Raises:
        InvariantError: for a trained token without a version, from a later version, or sampled greedily.
        StaleDataError: for a trained token more than `max_staleness` versions behind `batch.policy_version`.
    """
    versions = np.concatenate([np.empty(0, np.int32), *(i.sample.token_versions[i.sample.loss_mask] for i in batch.samples)])
    temperatures = [i.sample.temperatures[i.sample.loss_mask].min(initial=np.inf) for i in batch.samples]
    if min(temperatures, default=np.inf) <= 0:
        raise InvariantError("a trained token was sampled at temperature 0: greedy tokens have no policy gradient")
    tokens = float(sum(len(item.sample.token_ids) for item in batch.samples))
    if not len(versions):
        return {"tokens": tokens, "loss_tokens": 0.0}
    oldest, newest = int(versions.min()), int(versions.max())
    if oldest < 0 or newest > batch.policy_version:
        raise InvariantError(
            f"trained tokens have policy versions from {oldest} to {newest}; expected 0 to {batch.policy_version}, the "
            "version being trained"
        )
    if batch.policy_version - oldest > max_staleness:
        raise StaleDataError(
            f"a token sampled by version {oldest} reached the trainer at version {batch.policy_version}; at most "
            f"{max_staleness} version(s) behind are allowed (algorithm.max_staleness)"
        )
    return {
        "tokens": tokens,
        "loss_tokens": float(len(versions)),
        "max_staleness": float(batch.policy_version - oldest),
        "mean_staleness": float(batch.policy_version - versions.mean(dtype=np.float64)),
    }


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
