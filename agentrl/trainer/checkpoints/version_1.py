"""Checkpoints of version 1, which releases before sharded checkpoints wrote: whole tensors in two files.

Invariant: the digests of what is returned are correct.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec

from agentrl.errors import AgentRLError, TrainError
from agentrl.trainer.checkpoints.format import OPTIMIZER_FILE, STATE_FILE, TrainerState
from agentrl.weights.disk import verify_directory
from agentrl.weights.tensors import WEIGHTS_FILE, RawTensor, model_checksum, read_safetensors


class OldCheckpoint(NamedTuple):
    """A checkpoint of version 1; its tensors are views of the files."""

    state: TrainerState
    note: str
    weights: Mapping[str, RawTensor]
    optimizer: Mapping[str, RawTensor]


class OldRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The contents of its `trainer.json`."""

    state: TrainerState
    note: str
    model_checksum: str
    optimizer_checksum: str
    digest: str

    @property
    def own_digest(self) -> str:
        """What `digest` must be."""
        covered = msgspec.json.encode([self.state, self.note, self.model_checksum, self.optimizer_checksum])
        return hashlib.blake2b(covered, digest_size=16).hexdigest()


def read_version_1(directory: Path) -> OldCheckpoint:
    """Return the checkpoint at `directory` after checking every digest.

    Raises:
        TrainError: when it is incomplete or damaged, naming the file.
    """
    try:
        record = msgspec.json.decode((directory / STATE_FILE).read_bytes(), type=OldRecord)
    except (OSError, msgspec.DecodeError) as error:
        raise TrainError(f"{directory}: no readable {STATE_FILE} ({error}); this is not a whole checkpoint") from error
    if record.digest != record.own_digest:
        raise TrainError(f"{directory}: {STATE_FILE} was altered after it was written; use an earlier checkpoint")
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
    return OldCheckpoint(record.state, record.note, weights, optimizer)
