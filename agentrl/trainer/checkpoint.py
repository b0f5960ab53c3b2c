"""Trainer checkpoints: a HF model directory with the optimizer and counters beside the weights; no torch, no pickle.

Invariant: a checkpoint is visible whole or not at all, and a digest covers every byte that training continues from. A
damaged newest checkpoint is skipped with a warning; training never restarts from the beginning silently.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from agentrl.errors import AgentRLError, TrainError
from agentrl.weights.disk import atomic_directory, verify_directory, write_model
from agentrl.weights.tensors import RawTensor, model_checksum, read_safetensors, write_safetensors

STATE_FILE = "trainer.json"
OPTIMIZER_FILE = "optimizer.state"
"""In safetensors format, but under another suffix: servers load every `*.safetensors` of a directory as weights."""

_log = logging.getLogger(__name__)


class TrainerState(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The counters that training continues from."""

    policy_version: int
    """Version of the weights: the one of their publication, or that of the last batch plus one."""
    steps: int
    """Batches consumed."""
    optimizer_steps: int
    """Position in the learning-rate schedule."""
    bad_steps: int
    """Number of steps in a row, up to now, that were skipped because a number was not finite."""


class _StateFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    state: TrainerState
    note: str
    model_checksum: str
    optimizer_checksum: str
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A checkpoint whose digests are correct."""

    path: Path
    """A HF model directory."""
    state: TrainerState
    note: str
    """The note that was passed to `write_checkpoint`."""
    optimizer: Mapping[str, RawTensor]
    """Optimizer and random state, by name; views of the file."""


def write_checkpoint(
    directory: Path,
    *,
    weights: Mapping[str, RawTensor],
    optimizer: Mapping[str, RawTensor],
    state: TrainerState,
    source: Path,
    note: str = "",
) -> None:
    """Write a checkpoint that becomes visible as `directory` only when it is complete and flushed.

    Args:
        directory: final name; an existing directory is replaced after the new one is complete.
        weights: by HF parameter name.
        optimizer: optimizer and random state, by name.
        state: the counters.
        source: HF checkpoint whose config and tokenizer files are copied beside the weights.
        note: text that `read_checkpoint` returns.

    Raises:
        TrainError: naming the path and the cause, such as a full disk; no partial checkpoint stays.
    """
    with atomic_directory(directory) as folder:
        manifest = write_model(folder, weights, version=state.policy_version, source=source)
        write_safetensors(folder / OPTIMIZER_FILE, optimizer)
        optimizer_checksum = _checksum(optimizer)
        record = _StateFile(
            state=state,
            note=note,
            model_checksum=manifest.checksum,
            optimizer_checksum=optimizer_checksum,
            digest=_record_digest(state, note, manifest.checksum, optimizer_checksum),
        )
        (folder / STATE_FILE).write_bytes(msgspec.json.format(msgspec.json.encode(record), indent=1))


def read_checkpoint(directory: Path) -> Checkpoint:
    """Return the checkpoint at `directory` after checking every digest.

    Raises:
        TrainError: when the checkpoint is missing, incomplete or damaged, naming the file.
    """
    record = _read_record(directory)
    if _record_digest(record.state, record.note, record.model_checksum, record.optimizer_checksum) != record.digest:
        raise TrainError(f"{directory}: {STATE_FILE} was altered after it was written; use an earlier checkpoint")
    try:
        published = verify_directory(directory)
        optimizer = read_safetensors(directory / OPTIMIZER_FILE)
    except AgentRLError as error:
        raise TrainError(f"{directory} is damaged: {error}; use an earlier checkpoint") from error
    if (published.checksum, published.version) != (record.model_checksum, record.state.policy_version):
        raise TrainError(f"{directory}: the weights are not those {STATE_FILE} was written with; use an earlier checkpoint")
    if _checksum(optimizer) != record.optimizer_checksum:
        raise TrainError(f"{directory}: {OPTIMIZER_FILE} was altered after it was written; use an earlier checkpoint")
    return Checkpoint(path=directory, state=record.state, note=record.note, optimizer=optimizer)


def latest_checkpoint(root: Path) -> Checkpoint | None:
    """Return the newest undamaged checkpoint among the directories in `root`; None when `root` has no checkpoint.

    Each newer damaged checkpoint is logged as a warning.

    Raises:
        TrainError: when every checkpoint is damaged; a fresh start would hide the loss.
    """
    marked = [*root.glob(f"*/{STATE_FILE}"), *root.glob(f"*/{OPTIMIZER_FILE}")]
    folders = sorted({path.parent for path in marked if not path.parent.name.startswith(".")})
    problems: list[str] = []
    ages: list[tuple[int, str, Path]] = []
    for folder in folders:
        try:
            ages.append((_read_record(folder).state.steps, folder.name, folder))
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


def _read_record(directory: Path) -> _StateFile:
    try:
        return msgspec.json.decode((directory / STATE_FILE).read_bytes(), type=_StateFile)
    except (OSError, msgspec.DecodeError) as error:
        raise TrainError(f"{directory}: no readable {STATE_FILE} ({error}); this is not a whole checkpoint") from error


def _checksum(tensors: Mapping[str, RawTensor]) -> str:
    return model_checksum({name: tensor.checksum(name) for name, tensor in tensors.items()})


def _record_digest(state: TrainerState, *texts: str) -> str:
    return hashlib.blake2b(msgspec.json.encode([state, *texts]), digest_size=16).hexdigest()
