"""The files of a checkpoint and the contents of its two JSON files.

Invariant: a digest covers every byte that training continues from. The parts in `shards.json` cover each tensor exactly.

    trainer.json                  counters, note, and the digest of every file below
    shards.json                   which file holds which part of which tensor
    model.safetensors             the weights; of several ranks model-00001-of-00002.safetensors ... and an index
    optimizer.state               optimizer and random states; of several ranks optimizer-00001-of-00002.state ...
    config.json, tokenizer.json   and more copies, so that the directory is a Hugging Face model

Of an adapter, `adapter_model.safetensors`, `adapter_config.json` (as PEFT's) and `agentrl_base.json` (the digest of the
base) are in place of the weights and the copies, so that PEFT and servers load the directory.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Literal, TypeVar

import msgspec

from agentrl.errors import ConfigError, TrainError
from agentrl.weights.tensors import Index

Record = TypeVar("Record")
STATE_FILE: Final = "trainer.json"
SHARDS_FILE: Final = "shards.json"
OPTIMIZER_FILE: Final = "optimizer.state"
"""In safetensors format, but under another suffix: servers load every `*.safetensors` of a directory as weights."""
FORMAT_VERSION: Final = 2
"""Version 1 holds whole tensors in two files, with `manifest.json` in place of `shards.json`."""


class TrainerState(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The counters that training continues from."""

    policy_version: int
    """Version of the weights: their publication's, or one more than the version of the last batch."""
    steps: int
    """Batches consumed."""
    optimizer_steps: int
    """Position in the learning-rate schedule."""
    bad_steps: int
    """Steps in a row, up to now, that were skipped because a number was not finite."""


class FileRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The size of a file and its digest."""

    num_bytes: int
    checksum: str
    """BLAKE2b, 32 hex digits."""

    @classmethod
    def of(cls, path: Path) -> FileRecord:
        with path.open("rb") as file:
            checksum = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
            return cls(file.tell(), checksum)


class SliceRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A part of a tensor, which a file holds under the tensor's name."""

    file: str
    offset: Index
    shape: Index


class TensorRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tensor and where its parts are."""

    dtype: str
    """safetensors name of the type."""
    shape: Index
    slices: tuple[SliceRecord, ...]


class ShardIndex(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The contents of `shards.json`, or the part of one rank."""

    weights: dict[str, TensorRecord]
    optimizer: dict[str, TensorRecord]

    @classmethod
    def joined(cls, indexes: Sequence[ShardIndex]) -> ShardIndex:
        """Return the index of all ranks; raises TrainError where the parts of a tensor do not make it up."""
        weights, optimizer = [index.weights for index in indexes], [index.optimizer for index in indexes]
        index = cls(weights=_join_tensors(weights), optimizer=_join_tensors(optimizer))
        if problem := index.problem():
            raise TrainError(problem)
        return index

    def problem(self) -> str | None:
        """Return the first problem of parts that do not make up their tensor, with a file; None if all are whole."""
        tensors = (*self.weights.items(), *self.optimizer.items())
        return next((problem for name, tensor in tensors if (problem := _problem_of(name, tensor))), None)


class CheckpointRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The contents of `trainer.json`."""

    format: Literal["agentrl.checkpoint"] = "agentrl.checkpoint"
    version: int = FORMAT_VERSION
    state: TrainerState
    note: str
    world: int
    """Number of processes of the trainer that wrote it."""
    files: dict[str, FileRecord]
    digest: str

    @property
    def own_digest(self) -> str:
        return hashlib.blake2b(msgspec.json.encode(msgspec.structs.replace(self, digest="")), digest_size=16).hexdigest()


class AnyRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of `trainer.json` in every version of the format."""

    version: int = 1
    state: TrainerState


def read_any_record(directory: Path) -> AnyRecord:
    """Return the unchecked counters of the checkpoint at `directory`, and the version of its format.

    Raises:
        TrainError: there is no whole checkpoint.
        ConfigError: a later release wrote it.
    """
    version = read_state_file(directory, _Version).version
    if version > FORMAT_VERSION:
        raise ConfigError(
            f"{directory}: {STATE_FILE} has format version {version}, and this release reads versions 1 to "
            f"{FORMAT_VERSION}; continue with the release that wrote it, or a later one"
        )
    return read_state_file(directory, AnyRecord)


def read_state_file(directory: Path, kind: type[Record]) -> Record:
    """Return the contents of `trainer.json`; raises TrainError when it cannot be read or decoded."""
    try:
        return msgspec.json.decode((directory / STATE_FILE).read_bytes(), type=kind)
    except (OSError, msgspec.DecodeError) as error:
        raise TrainError(f"{directory}: no readable {STATE_FILE} ({error}); this is not a whole checkpoint") from error


def shard_file(name: str, rank: int, world: int) -> str:
    """Return the name of a rank's part of the file `name`, such as `model-00002-of-00002.safetensors` of several ranks."""
    stem, _, suffix = name.rpartition(".")
    return name if world == 1 else f"{stem}-{rank + 1:05d}-of-{world:05d}.{suffix}"


class _Version(msgspec.Struct, frozen=True):
    version: int = 1


def _join_tensors(tensors: Sequence[dict[str, TensorRecord]]) -> dict[str, TensorRecord]:
    every: dict[str, TensorRecord] = {}
    for part in tensors:
        for name, tensor in part.items():
            before = every[name].slices if name in every else ()
            every[name] = msgspec.structs.replace(tensor, slices=before + tensor.slices)
    return every


def _problem_of(name: str, tensor: TensorRecord) -> str | None:
    title = f"{name} {tensor.shape}"
    for part in tensor.slices:
        if not _is_within(part, tensor.shape):
            return f"{title}: {_describe(part)} is outside the tensor"
    parts = sorted((part for part in tensor.slices if math.prod(part.shape)), key=lambda part: part.offset)
    for number, part in enumerate(parts):
        for later in parts[number + 1 :]:
            if later.offset and later.offset[0] >= part.offset[0] + part.shape[0]:
                break  # as do all after it, this part begins behind the end of the first
            if _overlap(part, later):
                return f"{title}: {_describe(later)} overlaps {_describe(part)}"
    stored = sum(math.prod(part.shape) for part in parts)
    if stored != math.prod(tensor.shape):
        files = sorted({part.file for part in tensor.slices})
        return f"{title}: its parts in {files} have {stored} of {math.prod(tensor.shape)} elements"
    return None


def _is_within(part: SliceRecord, whole: Index) -> bool:
    if not len(part.offset) == len(part.shape) == len(whole):
        return False
    ranges = zip(part.offset, part.shape, whole, strict=True)
    return all(0 <= begin <= begin + size <= end for begin, size, end in ranges)


def _overlap(one: SliceRecord, other: SliceRecord) -> bool:
    ranges = zip(one.offset, one.shape, other.offset, other.shape, strict=True)
    return all(a < b + m and b < a + n for a, n, b, m in ranges)


def _describe(part: SliceRecord) -> str:
    return f"the part of {part.file} at {part.offset} of shape {part.shape}"
