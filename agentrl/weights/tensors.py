"""Tensors as bytes, their digests, parts and safetensors files; without torch, so that any process can use them.

Invariant: the digest of a tensor depends only on its HF name, dtype, shape and little-endian bytes, so trainer, file and
server compute the same digest. The bytes of a written file depend only on the same four. A tensor that was read is a view
of the file, and its bounds were checked. The parts of a stored tensor cover it without overlap, so any box of it can be put
together from them.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import msgspec
import numpy as np

from agentrl.errors import TrainError, WeightSyncError

ITEM_BYTES: Mapping[str, int] = {
    "F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4,
    "BF16": 2, "F16": 2, "I16": 2, "U16": 2, "I8": 1, "U8": 1, "BOOL": 1,
}  # fmt: skip
"""Bytes per element of the safetensors types that agentrl reads and writes."""

WEIGHTS_FILE = "model.safetensors"
WEIGHTS_INDEX_FILE = f"{WEIGHTS_FILE}.index.json"
"""Name of the index, which maps each tensor to one of several files."""
_MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors format
Index: TypeAlias = tuple[int, ...]
"""One number for each dimension of a tensor."""


def tensor_checksum(name: str, dtype: str, shape: Sequence[int], data: bytes | memoryview) -> str:
    """Return the digest, 32 hex digits (BLAKE2b), of a tensor's name, safetensors type, shape and row-major elements."""
    # Name, type and shape are part of it: equal bytes under another name or shape are another tensor.
    digest = hashlib.blake2b(f"{name}\0{dtype}\0{','.join(map(str, shape))}\0".encode(), digest_size=16)
    digest.update(data)
    return digest.hexdigest()


def model_checksum(tensor_checksums: Mapping[str, str]) -> str:
    """Return the digest of a whole model from the digests of its tensors, 32 hex digits."""
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(tensor_checksums):
        digest.update(f"{name}\0{tensor_checksums[name]}\0".encode())
    return digest.hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class RawTensor:
    """A tensor as bytes."""

    dtype: str
    """safetensors name of the type, such as `F32`."""
    shape: tuple[int, ...]
    data: memoryview
    """The elements, row-major, little-endian, as bytes."""

    @classmethod
    def of(cls, array: np.ndarray) -> RawTensor:
        """Return `array` as a raw tensor; copies only if it is not contiguous."""
        array = np.asarray(array)
        name = _NUMPY_NAMES[array.dtype.newbyteorder("=").str[1:]]
        flat = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<")).reshape(-1)
        return cls(dtype=name, shape=tuple(array.shape), data=flat.view(np.uint8).data)

    def checksum(self, name: str) -> str:
        return tensor_checksum(name, self.dtype, self.shape, self.data)


class _TensorHeader(msgspec.Struct, frozen=True):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


_NUMPY_NAMES = {
    "f8": "F64",
    "f4": "F32",
    "f2": "F16",
    "i8": "I64",
    "i4": "I32",
    "i2": "I16",
    "i1": "I8",
    "u1": "U8",
    "b1": "BOOL",
}


def write_safetensors(path: Path, tensors: Mapping[str, RawTensor]) -> None:
    """Write `tensors` to `path` in safetensors format."""
    # Wide types first keeps every tensor aligned to its item size, as the readers of other programs expect.
    order = sorted(tensors, key=lambda name: (-ITEM_BYTES[tensors[name].dtype], name))
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name in order:
        tensor = tensors[name]
        header[name] = _TensorHeader(tensor.dtype, tensor.shape, (at, at + len(tensor.data)))
        at += len(tensor.data)
    encoded = msgspec.json.encode(header)
    # The header is padded to 8 bytes, so that the first tensor is aligned in a mapped file.
    encoded += b" " * (-len(encoded) % 8)
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little"))
        file.write(encoded)
        for name in order:
            file.write(tensors[name].data)


def read_safetensors(path: Path) -> dict[str, RawTensor]:
    """Return the tensors of a safetensors file as read-only views of the mapped file."""
    try:
        mapped = np.memmap(path, np.uint8, mode="r")
    except (OSError, ValueError) as error:
        raise WeightSyncError(f"{path}: cannot be read as safetensors: {error}") from error
    size = int.from_bytes(mapped[:8].tobytes(), "little")
    # The length is read from the file: without a bound a damaged one would ask for any amount of memory.
    if len(mapped) < 8 or size > min(_MAX_HEADER_BYTES, len(mapped) - 8):
        raise WeightSyncError(f"{path}: header of {size} bytes in a file of {len(mapped)}; the file is damaged or cut short")
    try:
        header = msgspec.json.decode(mapped[8 : 8 + size].tobytes(), type=dict[str, msgspec.Raw])
        header.pop("__metadata__", None)
        entries = {name: msgspec.json.decode(raw, type=_TensorHeader) for name, raw in header.items()}
    except msgspec.DecodeError as error:
        raise WeightSyncError(f"{path}: header is not safetensors JSON ({error}); the file is damaged") from error
    body = mapped.data[8 + size :]
    return {name: _view(path, name, entry, body) for name, entry in entries.items()}


def equal_as_bfloat16(first: Path, second: Path) -> bool:
    """Return whether the weights of two published directories are equal once float32 is rounded to the nearest bfloat16."""
    ours, theirs = (read_safetensors(directory / WEIGHTS_FILE) for directory in (first, second))
    if ours.keys() != theirs.keys():
        return False
    return all(
        as_held(ours[name], "bfloat16").data.tobytes() == as_held(theirs[name], "bfloat16").data.tobytes() for name in ours
    )


_WIDER: Mapping[str, str] = {"F64": "F64", "F32": "F64 F32", "BF16": "F64 F32 BF16", "F16": "F64 F32 F16"}
"""For each type, the types that hold all its values."""
_HELD_TYPES: Mapping[str, str] = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}


def held_type(stored: str, held: str) -> str:
    """Return the safetensors type in which weights that are stored as `stored` and held as `held` have their digest.

    Args:
        stored: type in the file, as safetensors names it.
        held: type in the server's memory, as torch names it.

    The digest has the type `stored` where `held` keeps every value, and else the type of the server.

    Example:
        >>> held_type("F32", "bfloat16"), held_type("BF16", "float32"), held_type("F32", "float32")
        ('BF16', 'BF16', 'F32')
    """
    kind = _HELD_TYPES.get(held, stored)
    return stored if kind in _WIDER.get(stored, stored).split() else kind


def as_held(tensor: RawTensor, held: str) -> RawTensor:
    """Return a stored tensor in `held_type`, rounded to the nearest value, ties to even, as torch rounds it."""
    kind = held_type(tensor.dtype, held)
    if kind == tensor.dtype:
        return tensor
    with np.errstate(over="ignore"):  # what is too large becomes infinite
        if tensor.dtype == "BF16":
            wide = (np.frombuffer(tensor.data, "<u2").astype("<u4") << 16).view("<f4")
        else:
            wide = np.frombuffer(tensor.data, {"F64": "<f8", "F32": "<f4", "F16": "<f2"}[tensor.dtype]).astype("<f4")
        if kind == "BF16":
            bits = wide.view("<u4")
            # NumPy has no bfloat16. Just under half a step is added, and one more where the kept bits are odd: ties to even.
            narrow = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")
        else:
            narrow = wide.astype({"F32": "<f4", "F16": "<f2"}[kind])
    return RawTensor(dtype=kind, shape=tensor.shape, data=narrow.view(np.uint8).data)


def held_checksums(path: Path, held: str) -> dict[str, str]:
    """Return the digest of each tensor of a safetensors file, as a server reports it that holds weights as `held`."""
    return {name: as_held(tensor, held).checksum(name) for name, tensor in read_safetensors(path).items()}


def _view(path: Path, name: str, entry: _TensorHeader, body: memoryview) -> RawTensor:
    start, end = entry.data_offsets
    expected = math.prod(entry.shape) * ITEM_BYTES.get(entry.dtype, -1)
    if min(entry.shape, default=0) < 0 or not 0 <= start <= end <= len(body) or end - start != expected:
        raise WeightSyncError(
            f"{path}: tensor {name!r} {entry.dtype}{list(entry.shape)} at bytes {start}-{end} of {len(body)}: "
            "the file is damaged or cut short"
        )
    return RawTensor(dtype=entry.dtype, shape=entry.shape, data=body[start:end])


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorPart:
    """A box of a tensor, with its elements."""

    whole: Index
    """Shape of the whole tensor."""
    offset: Index
    """First index of the box in each dimension."""
    data: RawTensor
    """The elements, in the shape of the box."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """A tensor whose parts are in files."""

    dtype: str
    """safetensors name of the type, such as `F32`."""
    shape: Index
    parts: tuple[TensorPart, ...]
    """Views of the files: only the elements that are asked for are read."""

    @classmethod
    def of(cls, raw: RawTensor) -> StoredTensor:
        part = TensorPart(whole=raw.shape, offset=(0,) * len(raw.shape), data=raw)
        return cls(dtype=raw.dtype, shape=raw.shape, parts=(part,))

    def whole(self) -> RawTensor:
        if len(self.parts) == 1 and self.parts[0].data.shape == self.shape:
            return self.parts[0].data
        return self.box((0,) * len(self.shape), self.shape)

    def box(self, offset: Index, shape: Index) -> RawTensor:
        """Return the elements of the box that begins at `offset`, copied out of the parts that it meets."""
        elements = np.dtype(f"<u{ITEM_BYTES[self.dtype]}")
        elements_of_box = np.empty(shape, elements)
        missing = elements_of_box.size
        for part in self.parts:
            begin = tuple(map(max, offset, part.offset))
            end = tuple(min(a + n, b + m) for a, n, b, m in zip(offset, shape, part.offset, part.data.shape, strict=True))
            size = tuple(stop - start for start, stop in zip(begin, end, strict=True))
            if min(size, default=1) <= 0:
                continue
            source = np.frombuffer(part.data.data, elements).reshape(part.data.shape)
            elements_of_box[_relative_slices(begin, offset, size)] = source[_relative_slices(begin, part.offset, size)]
            missing -= math.prod(size)
        if missing:
            raise TrainError(
                f"{missing} of {elements_of_box.size} elements at {offset} of a tensor {self.shape} are in no file"
            )
        return RawTensor(dtype=self.dtype, shape=shape, data=elements_of_box.reshape(-1).view(np.uint8).data)


def _relative_slices(begin: Index, origin: Index, size: Index) -> tuple[slice, ...]:
    return tuple(slice(at - zero, at - zero + n) for at, zero, n in zip(begin, origin, size, strict=True))
