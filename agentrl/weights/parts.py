"""Parts of tensors: boxes of elements that files store, and that trainer ranks hold and ask for. No torch here.

Invariant: the parts of a stored tensor cover it without overlap, so any box of it can be put together from them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from agentrl.errors import TrainError
from agentrl.weights.tensors import ITEM_BYTES, RawTensor

Index: TypeAlias = tuple[int, ...]
"""One number for each dimension of a tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorPart:
    """A box of a tensor, with its elements."""

    whole: Index
    """Shape of the whole tensor."""
    offset: Index
    """First index of the box in each dimension."""
    data: RawTensor
    """The elements; their shape is that of the box."""


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
        found = np.empty(shape, elements)
        missing = found.size
        for part in self.parts:
            begin = tuple(map(max, offset, part.offset))
            end = tuple(min(a + n, b + m) for a, n, b, m in zip(offset, shape, part.offset, part.data.shape, strict=True))
            size = tuple(stop - start for start, stop in zip(begin, end, strict=True))
            if min(size, default=1) <= 0:
                continue
            source = np.frombuffer(part.data.data, elements).reshape(part.data.shape)
            found[_relative_slices(begin, offset, size)] = source[_relative_slices(begin, part.offset, size)]
            missing -= math.prod(size)
        if missing:
            raise TrainError(f"{missing} of {found.size} elements at {offset} of a tensor {self.shape} are in no file")
        return RawTensor(dtype=self.dtype, shape=shape, data=found.reshape(-1).view(np.uint8).data)


def _relative_slices(begin: Index, origin: Index, size: Index) -> tuple[slice, ...]:
    return tuple(slice(at - zero, at - zero + n) for at, zero, n in zip(begin, origin, size, strict=True))
