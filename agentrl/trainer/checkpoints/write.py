"""Write a checkpoint while training continues: every rank copies and writes its part, all of them visible at once.

Invariant: the directory has its final name only after the files of every rank are flushed. The outcome is the same on every
rank: an error of one rank is that of all, no rank waits, and nothing partial stays. One trainer writes under one parent
directory, one checkpoint at a time.

Each element is in the copies of exactly one rank, as the bytes that training uses, so a restored trainer continues bit for
bit. No rank holds the whole model: weights are gathered one tensor at a time, and optimizer state not at all.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from agentrl.errors import AgentRLError, TrainError
from agentrl.trainer.base import SaveReport
from agentrl.trainer.checkpoints.format import (
    OPTIMIZER_FILE,
    SHARDS_FILE,
    STATE_FILE,
    CheckpointRecord,
    FileRecord,
    ShardIndex,
    SliceRecord,
    TensorRecord,
    TrainerState,
    shard_file,
)
from agentrl.trainer.lora import Adapter
from agentrl.trainer.model import PolicyModel
from agentrl.trainer.parallel.ranks import Ranks, together
from agentrl.trainer.parallel.shard import held_box, whole
from agentrl.trainer.parallel.snapshot import raw_tensor, torch_tensor
from agentrl.weights.disk import (
    atomic_directory,
    copy_model_files,
    flush,
    partial_directory,
    remove_partial_directories,
    write_error,
)
from agentrl.weights.peft_files import ADAPTER_WEIGHTS_FILE
from agentrl.weights.tensors import WEIGHTS_FILE, WEIGHTS_INDEX_FILE, Index, StoredTensor, TensorPart, write_safetensors

if TYPE_CHECKING:
    from agentrl.trainer.parallel.ranks import Ranks

Result = TypeVar("Result")
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedParts:
    """The parts that one rank writes, in host memory."""

    weights: Mapping[str, TensorPart]
    """Whole tensors, by HF parameter name."""
    optimizer: Mapping[str, TensorPart]
    """By name; random states are among them."""
    adapter: Mapping[str, bytes] | None = None
    """Settings files of an adapter, where `weights` holds its matrices by PEFT's names. Rank 0 has all of them."""


def stage_weights(model: PolicyModel) -> dict[str, TensorPart]:
    """Return copies of the weights that this rank writes, under HF names; every rank must call it."""
    ranks, parameters = model.ranks, model.parameters
    sizes = [HeldPart(name, (0,) * p.ndim, p.numel() * p.element_size()) for name, p in parameters.items()]
    mine = names_to_write([sizes] * ranks.world, ranks.rank)
    owned: dict[str, Tensor] = {}
    for name, parameter in parameters.items():
        gathered = whole(parameter.detach())  # a collective: every rank takes part
        if name in mine:
            owned[name] = _host_copy(gathered)
    if ranks.rank == 0:
        owned |= {name: _host_copy(buffer) for name, buffer in model.saved_buffers().items()}
    named = {name: raw_tensor(tensor) for name, tensor in model.with_checkpoint_names(owned).items()}
    return {name: TensorPart(whole=raw.shape, offset=(0,) * len(raw.shape), data=raw) for name, raw in named.items()}


def stage_adapter(model: PolicyModel, adapter: Adapter, optimizer: Mapping[str, TensorPart]) -> StagedParts:
    """Return copies of an adapter on rank 0, and this rank's part of the optimizer; every rank must call it."""
    copies: dict[str, TensorPart] = {}
    for name, parameter in adapter.matrices().values():
        gathered = whole(parameter.detach())  # a collective: every rank takes part
        if model.ranks.rank == 0:
            raw = raw_tensor(_host_copy(gathered))
            copies[name] = TensorPart(whole=raw.shape, offset=(0,) * len(raw.shape), data=raw)
    return StagedParts(weights=copies, optimizer=optimizer, adapter=adapter.documents(model.base))


def stage_parts(tensors: Mapping[str, Tensor], ranks: Ranks) -> dict[str, TensorPart]:
    """Return copies of the parts of `tensors` that this rank writes; every rank must call it.

    Each tensor is split, or held whole by every rank that has it. Of ranks that hold the same part, one writes it.
    """
    parts = {name: held_box(tensor) for name, tensor in tensors.items()}
    held = [HeldPart(name, offset, part.numel() * part.element_size()) for name, (offset, part) in parts.items()]
    filled = [part for part in held if part.num_bytes]
    every = [msgspec.json.decode(data, type=list[HeldPart]) for data in ranks.gather(msgspec.json.encode(filled))]
    return {
        name: TensorPart(
            whole=tuple(tensors[name].shape), offset=parts[name].offset, data=raw_tensor(_host_copy(parts[name].elements))
        )
        for name in sorted(names_to_write(every, ranks.rank))
    }


def take_state(parameter: Tensor, stored: StoredTensor) -> Tensor:
    """Return optimizer state `stored` of `parameter`: split like the parameter, or whole if it is a number."""
    if not stored.shape or stored.shape != tuple(parameter.shape):
        return torch_tensor(stored.whole()).to(parameter.device)
    offset, elements = held_box(parameter.detach())
    values = torch_tensor(stored.box(offset, tuple(elements.shape))).to(parameter.device)
    if not isinstance(parameter, DTensor):
        return values
    state = torch.zeros_like(parameter, dtype=values.dtype, requires_grad=False)
    held_box(state).elements.copy_(values)
    return state


def _host_copy(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True).contiguous()


class HeldPart(msgspec.Struct, frozen=True, array_like=True):
    """A part of the tensor `name` that a rank could write."""

    name: str
    offset: Index
    num_bytes: int


def names_to_write(held: Sequence[Sequence[HeldPart]], rank: int) -> frozenset[str]:
    """Return the names of the tensors whose part `rank` writes, from the parts that each rank holds.

    Of the ranks that hold the same part, the one with the least to write so far is chosen, the largest parts first; so all
    ranks agree.
    """
    holders: dict[HeldPart, list[int]] = {}
    for number, parts in enumerate(held):
        for part in parts:
            holders.setdefault(part, []).append(number)
    load = [0] * len(held)
    chosen: set[str] = set()
    for part in sorted(holders, key=lambda part: (-part.num_bytes, part.name, part.offset)):
        writer = min(holders[part], key=lambda number: (load[number], number))
        load[writer] += part.num_bytes
        if writer == rank:
            chosen.add(part.name)
    return frozenset(chosen)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointJob:
    """The part of a checkpoint that one rank writes."""

    directory: Path
    """Final name; an existing directory is replaced after the new one is complete."""
    parts: StagedParts
    state: TrainerState
    note: str
    source: Path
    """HF checkpoint whose config and tokenizer files are copied next to the weights."""


class RankReport(msgspec.Struct, frozen=True):
    """The files that one rank has written."""

    files: dict[str, FileRecord]
    index: ShardIndex


def write_checkpoint(ranks: Ranks, job: CheckpointJob) -> None:
    """Write this rank's part of a checkpoint, and return when all of it is visible and flushed; every rank must call it.

    Raises:
        TrainError: on every rank; names the path and the cause, such as a full disk.
    """
    with ExitStack() as commit:
        folder = _agreed(ranks, partial(_open_partial, ranks, job, commit))
        report = _agreed(ranks, partial(_write_part, ranks, job, folder))
        reports = [msgspec.json.decode(data, type=RankReport) for data in ranks.gather(msgspec.json.encode(report))]
        _agreed(ranks, partial(_complete, ranks, job, folder, reports, commit))


def _open_partial(ranks: Ranks, job: CheckpointJob, commit: ExitStack) -> Path:
    if ranks.rank:
        return partial_directory(job.directory)
    remove_partial_directories(job.directory.parent)
    return commit.enter_context(atomic_directory(job.directory))


def _write_part(ranks: Ranks, job: CheckpointJob, folder: Path) -> RankReport:
    files: dict[str, FileRecord] = {}
    indexes: list[dict[str, TensorRecord]] = []
    try:
        optimizer = shard_file(OPTIMIZER_FILE, ranks.rank, ranks.world)
        weights = shard_file(WEIGHTS_FILE, ranks.rank, ranks.world) if job.parts.adapter is None else ADAPTER_WEIGHTS_FILE
        for name, parts in ((weights, job.parts.weights), (optimizer, job.parts.optimizer)):
            if parts:
                write_safetensors(folder / name, {key: part.data for key, part in parts.items()})
                flush(folder / name)
                files[name] = FileRecord.of(folder / name)
            indexes.append({key: _record(part, name) for key, part in parts.items()})
    except OSError as error:
        raise write_error(job.directory, error) from error
    return RankReport(files, ShardIndex(*indexes))


def _complete(ranks: Ranks, job: CheckpointJob, folder: Path, reports: list[RankReport], commit: ExitStack) -> None:
    if ranks.rank:
        return
    try:
        files = {name: record for report in reports for name, record in report.files.items()}
        index = ShardIndex.joined([report.index for report in reports])
        extra = {SHARDS_FILE: msgspec.json.encode(index), **(job.parts.adapter or {})}
        if ranks.world > 1 and job.parts.adapter is None:
            extra[WEIGHTS_INDEX_FILE] = _weights_index(index.weights, files)
        for name, content in extra.items():
            (folder / name).write_bytes(content)
            files[name] = FileRecord.of(folder / name)
        if job.parts.adapter is None:  # beside an adapter, servers would take its tokenizer for another one
            copy_model_files(job.source, folder)
        unsigned = CheckpointRecord(state=job.state, note=job.note, world=ranks.world, files=files, digest="")
        record = msgspec.structs.replace(unsigned, digest=unsigned.own_digest)
        (folder / STATE_FILE).write_bytes(msgspec.json.format(msgspec.json.encode(record), indent=1))
    except OSError as error:
        raise write_error(job.directory, error) from error
    commit.close()


def _agreed(ranks: Ranks, action: Callable[[], Result]) -> Result:
    """Run `action` on every rank and return its result; if it fails on one rank, it fails on all."""

    def checked() -> Result:
        try:
            return action()
        except AgentRLError:
            raise
        except Exception as error:  # the other ranks' threads would wait for this one
            _log.exception("a checkpoint cannot be written")
            raise TrainError(f"a checkpoint cannot be written: {type(error).__name__}: {error}") from error

    return together(ranks, checked)


def _record(part: TensorPart, file: str) -> TensorRecord:
    return TensorRecord(part.data.dtype, part.whole, (SliceRecord(file, part.offset, part.data.shape),))


def _weights_index(weights: Mapping[str, TensorRecord], files: Mapping[str, FileRecord]) -> bytes:
    """Return the index by which HF libraries find weights in several files."""
    places = {name: tensor.slices[0].file for name, tensor in sorted(weights.items())}
    size = sum(files[name].num_bytes for name in set(places.values()))
    return msgspec.json.format(msgspec.json.encode({"metadata": {"total_size": size}, "weight_map": places}), indent=1)


class BackgroundWriter:
    """The thread in which a rank writes its part of a checkpoint, in step with the other ranks."""

    def __init__(self, ranks: Ranks) -> None:
        """Start with nothing to write; every rank must make a writer at the same time."""
        self._ranks = ranks
        self._in_thread = ranks.beside()
        self._threads = ThreadPoolExecutor(1, "agentrl checkpoint")
        self._writing: Future[SaveReport] | None = None

    def start(self, job: CheckpointJob) -> None:
        """Begin to write; after `finish` has given the outcome of the write before."""
        assert self._writing is None
        self._writing = self._threads.submit(self._write, job)

    def finish(self, *, wait: bool) -> SaveReport | None:
        """Return the checkpoint that was started, once it is on the disk and once only; every rank must call it.

        Without `wait`, None is returned while it is being written; raises TrainError, which names the path and the cause.
        """
        writing = self._writing
        if writing is None:
            return None
        # All ranks wait or none does: what rank 0 says holds for all.
        ready = None if self._ranks.rank else bytes([wait or writing.done()])
        if self._ranks.share(ready) == b"\0":
            return None
        self._writing = None
        return writing.result()

    def close(self) -> None:
        self._threads.shutdown()

    def _write(self, job: CheckpointJob) -> SaveReport:
        begin = time.perf_counter()
        write_checkpoint(self._in_thread, job)
        return SaveReport(directory=str(job.directory), seconds=time.perf_counter() - begin)
