"""Torch tensors as bytes, and back: both ways keep every bit, the type and the shape."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from agentrl.weights.tensors import RawTensor

_TORCH_TYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
_TYPE_NAMES = {value: key for key, value in _TORCH_TYPES.items()}


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
