"""Tensors in host memory: whole weights on rank 0 that stay as they are when the trainer steps, and tensors as bytes.

Invariant: a copy has exactly the values of the trained tensor, cast once; each element comes from one rank, however the
weights are split. Beside the copies, a rank holds the parts of one bucket. Bytes keep every bit, the type and the shape.
"""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from agentrl.errors import InvariantError, TrainError
from agentrl.trainer.parallel.ranks import Ranks, together
from agentrl.trainer.parallel.shard import held_box, local_part
from agentrl.weights.tensors import RawTensor

BUCKET_BYTES: Final = 64 << 20
"""Bytes that are gathered at a time; a larger tensor is a bucket of its own."""
_MAX_DIMS: Final = 8
_ALIGNMENT: Final = 64
"""Bytes at whose multiples a tensor begins in a file."""
_TORCH_TYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
_TYPE_NAMES = {value: key for key, value in _TORCH_TYPES.items()}


Change: TypeAlias = Callable[[str, Tensor], Tensor]
"""Returns what leaves in place of the elements that this rank holds of a tensor, by its name."""


@dataclass(frozen=True, slots=True)
class _RankPart:
    """The part of a tensor that one rank contributes."""

    rank: int
    offsets: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def of(self, whole: Tensor) -> Tensor:
        for dim, (offset, length) in enumerate(zip(self.offsets, self.shape, strict=True)):
            whole = whole.narrow(dim, offset, length)
        return whole


def snapshot(
    tensors: Mapping[str, Tensor],
    ranks: Ranks,
    *,
    dtype: torch.dtype | None = None,
    in_file: bool = False,
    change: Change | None = None,
) -> dict[str, Tensor]:
    """Return contiguous copies of whole `tensors` on the host; empty on ranks other than 0.

    It is a collective where a tensor is split, or with `in_file`, and takes the same names in the same order on every rank.
    On GPUs the copies in memory are pinned; those in a file take memory only as long as there is enough of it.
    `change` makes what is copied of the elements that a rank holds of a tensor, in the same shape.

    Raises:
        InvariantError: the parts of a tensor do not make it up.
        TrainError: the disk has no room for the file.
    """
    split = {name: tensor for name, tensor in tensors.items() if isinstance(tensor, DTensor)}
    copies: dict[str, Tensor] = {}
    if in_file:
        copies = together(ranks, lambda: _file_empty(tensors, dtype) if ranks.rank == 0 else {})
    elif ranks.rank == 0:
        copies = {name: _host_empty(tensor, dtype) for name, tensor in tensors.items()}
    if ranks.rank == 0:
        for name, tensor in tensors.items():
            if name not in split:
                copies[name].copy_(_leaving(name, tensor, change), non_blocking=True)
    parts = _parts_of_all(split, ranks)
    for names in _buckets(split, dtype):
        _collect(names, split, parts, copies, ranks, dtype, change)
    if any(tensor.is_cuda for tensor in tensors.values()):
        torch.cuda.synchronize()
    return copies


def _leaving(name: str, tensor: Tensor, change: Change | None) -> Tensor:
    return local_part(tensor).detach() if change is None else change(name, tensor)


def _host_empty(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    return torch.empty(tensor.shape, dtype=dtype or tensor.dtype, pin_memory=tensor.is_cuda)


def _file_empty(tensors: Mapping[str, Tensor], dtype: torch.dtype | None) -> dict[str, Tensor]:
    """Return tensors in a file of `TMPDIR`, which has no name any more and ends with the last of them."""
    places: dict[str, int] = {}
    size = 0
    for name, tensor in tensors.items():
        places[name] = size
        size += -(-tensor.numel() * (dtype or tensor.dtype).itemsize // _ALIGNMENT) * _ALIGNMENT
    with tempfile.NamedTemporaryFile(prefix="agentrl-weights-") as file:
        try:
            if hasattr(os, "posix_fallocate"):  # so that a full disk fails here and not in use; macOS does not have it
                os.posix_fallocate(file.fileno(), 0, max(1, size))
        except OSError as error:
            raise TrainError(
                f"{file.name}: no room for {size / 2**30:.2f} GiB of weights ({error.strerror}); set TMPDIR to a directory "
                "on a disk with more room, or trainer.snapshot: host"
            ) from error
        mapped = torch.from_file(file.name, shared=True, size=max(1, size), dtype=torch.uint8)
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        kind = dtype or tensor.dtype
        part = mapped[places[name] : places[name] + tensor.numel() * kind.itemsize]
        found[name] = part.view(kind).view(tensor.shape)
    return found


def _buckets(tensors: Mapping[str, Tensor], dtype: torch.dtype | None) -> Iterable[list[str]]:
    """Yield the names of `tensors` in groups of one type and at most `BUCKET_BYTES`, or of one tensor."""
    names: list[str] = []
    room, kind = 0, None
    for name, tensor in tensors.items():
        size = tensor.numel() * (dtype or tensor.dtype).itemsize
        if names and (size > room or tensor.dtype != kind):
            yield names
            names = []
        if not names:
            room, kind = BUCKET_BYTES, tensor.dtype
        names.append(name)
        room -= size
    if names:
        yield names


def _parts_of_all(tensors: Mapping[str, DTensor], ranks: Ranks) -> dict[str, list[_RankPart]]:
    """Return, for each tensor, parts that make it up, each of the lowest rank that holds it."""
    if not tensors:
        return {}
    own = torch.zeros(len(tensors), 2, _MAX_DIMS, dtype=torch.int64)
    for row, tensor in zip(own, tensors.values(), strict=True):
        offset, elements = held_box(tensor)
        row[0, : tensor.ndim], row[1, : tensor.ndim] = torch.tensor(offset), torch.tensor(elements.shape)
    layouts = [layout.tolist() for layout in ranks.gathered(own)]
    parts: dict[str, list[_RankPart]] = {}
    for number, (name, tensor) in enumerate(tensors.items()):
        found: dict[tuple[tuple[int, ...], tuple[int, ...]], int] = {}
        for rank, layout in enumerate(layouts):
            offsets, shape = (tuple(values[: tensor.ndim]) for values in layout[number])
            if math.prod(shape):
                found.setdefault((offsets, shape), rank)
        parts[name] = [_RankPart(rank, offsets, shape) for (offsets, shape), rank in found.items()]
        if (covered := sum(part.size for part in parts[name])) != tensor.numel():
            raise InvariantError(f"{name}: expected parts of {tensor.numel()} elements together, the ranks have {covered}")
    return parts


def _collect(
    names: Sequence[str],
    tensors: Mapping[str, DTensor],
    parts: Mapping[str, Sequence[_RankPart]],
    copies: Mapping[str, Tensor],
    ranks: Ranks,
    dtype: torch.dtype | None,
    change: Change | None,
) -> None:
    """Gather the parts of some tensors on rank 0, all as long as the longest rank's, and copy them into place."""
    sizes = [sum(part.size for name in names for part in parts[name] if part.rank == rank) for rank in range(ranks.world)]
    first = tensors[names[0]].to_local()
    own = torch.empty(max(sizes), dtype=dtype or first.dtype, device=first.device)
    at = 0
    for name in names:
        for part in parts[name]:
            if part.rank == ranks.rank:
                own[at : at + part.size].view(part.shape).copy_(_leaving(name, tensors[name], change))
                at += part.size
    for rank, flat in enumerate(ranks.collected(own)):
        at = 0
        for name in names:
            for part in parts[name]:
                if part.rank == rank:
                    part.of(copies[name]).copy_(flat[at : at + part.size].view(part.shape), non_blocking=True)
                    at += part.size


def raw_tensor(tensor: Tensor) -> RawTensor:
    """Return `tensor` as bytes on the CPU; a contiguous CPU tensor is not copied."""
    flat = tensor.detach().to("cpu").contiguous()
    data = flat.reshape(-1).view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")
    return RawTensor(dtype=_TYPE_NAMES[flat.dtype], shape=tuple(flat.shape), data=data)


def torch_tensor(raw: RawTensor) -> Tensor:
    """Return a copy of `raw` as a CPU tensor."""
    dtype = _TORCH_TYPES[raw.dtype]
    if not len(raw.data):
        return torch.empty(raw.shape, dtype=dtype)
    return torch.frombuffer(bytearray(raw.data), dtype=dtype).reshape(raw.shape)
