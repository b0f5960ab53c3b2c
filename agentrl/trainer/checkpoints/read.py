"""Find and check checkpoints, also of format version 1; no torch, no pickle.

Invariant: the digests of a returned checkpoint are correct. A damaged newest checkpoint is skipped with a warning; training
never restarts from the beginning silently.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from agentrl.errors import AgentRLError, TrainError, WeightSyncError
from agentrl.trainer.checkpoints.format import (
    FORMAT_VERSION,
    OPTIMIZER_FILE,
    SHARDS_FILE,
    STATE_FILE,
    CheckpointRecord,
    FileRecord,
    ShardIndex,
    TensorRecord,
    TrainerState,
    read_any_record,
    read_state_file,
)
from agentrl.weights.disk import verify_directory
from agentrl.weights.tensors import WEIGHTS_FILE, RawTensor, StoredTensor, TensorPart, model_checksum, read_safetensors

_THREADS: Final = 4
"""Files whose digests are computed at a time, each at about a gigabyte a second."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A checkpoint whose digests are correct."""

    path: Path
    """A HF model directory."""
    state: TrainerState
    note: str
    world: int
    """Number of processes of the trainer that wrote it."""
    weights: Mapping[str, StoredTensor]
    """By HF parameter name."""
    optimizer: Mapping[str, StoredTensor]
    """Optimizer and random states, by name."""


def read_checkpoint(directory: Path, *, rank: int = 0, world: int = 1) -> Checkpoint:
    """Return the checkpoint at `directory`, with the digests of the files of reader `rank` of `world` checked.

    Raises:
        TrainError: the checkpoint is missing, incomplete or damaged; names the file.
        ConfigError: a later release wrote it.
    """
    if read_any_record(directory).version < FORMAT_VERSION:
        return _read_version_1(directory)
    record = _read_unaltered(directory, CheckpointRecord)
    _check_files(directory, record.files, sorted(record.files)[rank::world])
    try:
        index = msgspec.json.decode((directory / SHARDS_FILE).read_bytes(), type=ShardIndex)
        every = [*index.weights.values(), *index.optimizer.values()]
        names = sorted({part.file for tensor in every for part in tensor.slices})
        if unchecked := {SHARDS_FILE, *names} - record.files.keys():
            raise TrainError(
                f"{directory} is damaged: {STATE_FILE} has no digest of {sorted(unchecked)}; use an earlier checkpoint"
            )
        if problem := index.problem():
            raise TrainError(f"{directory} is damaged: {problem}; use an earlier checkpoint")
        files = {name: read_safetensors(directory / name) for name in names}
        return Checkpoint(
            path=directory,
            state=record.state,
            note=record.note,
            world=record.world,
            weights={name: _stored(name, tensor, files) for name, tensor in index.weights.items()},
            optimizer={name: _stored(name, tensor, files) for name, tensor in index.optimizer.items()},
        )
    except (OSError, KeyError, msgspec.DecodeError, WeightSyncError) as error:
        raise TrainError(f"{directory} is damaged: {error}; use an earlier checkpoint") from error


def latest_checkpoint(root: Path) -> Checkpoint | None:
    """Return the newest undamaged checkpoint among the directories in `root`; None when `root` has no checkpoint.

    Raises:
        TrainError: every checkpoint is damaged; a fresh start would hide the loss.
        ConfigError: a later release wrote one.
    """
    marked = [*root.glob(f"*/{STATE_FILE}"), *root.glob(f"*/{OPTIMIZER_FILE}"), *root.glob(f"*/{SHARDS_FILE}")]
    folders = sorted({path.parent for path in marked if not path.parent.name.startswith(".")})
    problems: list[str] = []
    ages: list[tuple[int, str, Path]] = []
    for folder in folders:
        try:
            ages.append((read_any_record(folder).state.steps, folder.name, folder))
        except TrainError as error:
            problems.append(str(error))
            _log.warning("checkpoint skipped: %s", error)
    for _, _, folder in sorted(ages, reverse=True):
        try:
            return read_checkpoint(folder)
        except TrainError as error:
            problems.append(str(error))
            _log.warning("checkpoint skipped, trying the one before: %s", error)
    if problems:
        listed = "\n  ".join(problems)
        raise TrainError(
            f"every checkpoint in {root} is damaged; move the directory away to start a new run. Found:\n  {listed}"
        )
    return None


def _check_files(directory: Path, files: Mapping[str, FileRecord], names: Sequence[str]) -> None:
    def problem(name: str) -> str | None:
        try:
            on_disk = FileRecord.of(directory / name)
        except OSError as error:
            return f"{name} cannot be read: {error.strerror}"
        if on_disk.num_bytes != files[name].num_bytes:
            return f"{name} has {on_disk.num_bytes} bytes instead of {files[name].num_bytes}"
        return None if on_disk == files[name] else f"{name} was altered after it was written"

    with ThreadPoolExecutor(_THREADS) as threads:
        problems = [found for found in threads.map(problem, names) if found is not None]
    if problems:
        raise TrainError(f"{directory} is damaged: {'; '.join(problems)}; use an earlier checkpoint")


def _stored(name: str, tensor: TensorRecord, files: Mapping[str, Mapping[str, RawTensor]]) -> StoredTensor:
    parts: list[TensorPart] = []
    for part in tensor.slices:
        raw = files[part.file][name]
        if (raw.dtype, raw.shape) != (tensor.dtype, part.shape):
            raise WeightSyncError(f"{part.file} holds {name} as {raw.dtype}{raw.shape}, not {tensor.dtype}{part.shape}")
        parts.append(TensorPart(whole=tensor.shape, offset=part.offset, data=raw))
    return StoredTensor(dtype=tensor.dtype, shape=tensor.shape, parts=tuple(parts))


class _Version1Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    state: TrainerState
    note: str
    model_checksum: str
    optimizer_checksum: str
    digest: str

    @property
    def own_digest(self) -> str:
        covered = msgspec.json.encode([self.state, self.note, self.model_checksum, self.optimizer_checksum])
        return hashlib.blake2b(covered, digest_size=16).hexdigest()


def _read_version_1(directory: Path) -> Checkpoint:
    """Return a checkpoint of whole tensors in two files, after checking every digest."""
    record = _read_unaltered(directory, _Version1Record)
    try:
        published = verify_directory(directory)
        weights = read_safetensors(directory / WEIGHTS_FILE)
        optimizer = read_safetensors(directory / OPTIMIZER_FILE)
    except AgentRLError as error:
        raise TrainError(f"{directory} is damaged: {error}; use an earlier checkpoint") from error
    if (published.checksum, published.version) != (record.model_checksum, record.state.policy_version):
        raise TrainError(f"{directory}: the weights are not those {STATE_FILE} was written with; use an earlier checkpoint")
    if model_checksum({name: tensor.checksum(name) for name, tensor in optimizer.items()}) != record.optimizer_checksum:
        raise TrainError(f"{directory}: {OPTIMIZER_FILE} was altered after it was written; use an earlier checkpoint")
    return Checkpoint(
        path=directory,
        state=record.state,
        note=record.note,
        world=1,
        weights={name: StoredTensor.of(raw) for name, raw in weights.items()},
        optimizer={name: StoredTensor.of(raw) for name, raw in optimizer.items()},
    )


_Signed = TypeVar("_Signed", CheckpointRecord, _Version1Record)


def _read_unaltered(directory: Path, kind: type[_Signed]) -> _Signed:
    record = read_state_file(directory, kind)
    if record.digest != record.own_digest:
        raise TrainError(f"{directory}: {STATE_FILE} was altered after it was written; use an earlier checkpoint")
    return record
