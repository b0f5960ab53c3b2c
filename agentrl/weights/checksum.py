"""Digests of weights, equal wherever they are computed: trainer, file, server.

Invariant: a tensor's digest depends on its HF name, dtype, shape and little-endian bytes, and on nothing else; the digest
of a model is that of its sorted tensor digests.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence


def tensor_checksum(name: str, dtype: str, shape: Sequence[int], data: bytes | memoryview) -> str:
    """Return the digest of one tensor, 32 hex digits (BLAKE2b).

    Args:
        name: HF parameter name.
        dtype: safetensors name of the type, such as `"F32"`.
        shape: the dimensions.
        data: the elements, row-major, little-endian.

    Example:
        >>> tensor_checksum("w", "F32", [1], bytes(4)) == tensor_checksum("w", "F32", [1], bytes(4))
        True
        >>> tensor_checksum("w", "F32", [1], bytes(4)) == tensor_checksum("w", "I32", [1], bytes(4))
        False
    """
    digest = hashlib.blake2b(f"{name}\0{dtype}\0{','.join(map(str, shape))}\0".encode(), digest_size=16)
    digest.update(data)
    return digest.hexdigest()


def model_checksum(tensor_checksums: Mapping[str, str]) -> str:
    """Return the digest of a whole model from the digests of its tensors, 32 hex digits."""
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(tensor_checksums):
        digest.update(f"{name}\0{tensor_checksums[name]}\0".encode())
    return digest.hexdigest()
