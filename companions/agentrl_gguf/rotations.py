"""The rotations of a model: `rope_parameters` of config.json from the keys of a file and its `rope_freqs.weight`.

A file holds no parameters of Llama 3's scaling, only the factor by which each frequency is divided. The parameters are
found by trying those that models have, and must give the factors of the file.
"""

from __future__ import annotations

import itertools
import math
from typing import Any, Final

import numpy as np

from agentrl.types import Float32Array
from agentrl_gguf.header import GgufHeader

FREQUENCIES: Final = "rope_freqs.weight"
_DEFAULT_BASE: Final = 10_000.0
_TOLERANCE: Final = 1e-5


def rope_parameters(header: GgufHeader, head_dim: int) -> dict[str, Any]:
    """Return `rope_parameters` for transformers.

    Raises:
        ConfigError: the positions are scaled in a way that is not known.
    """
    name = header.architecture
    base = header.get(f"{name}.rope.freq_base", float) or _DEFAULT_BASE
    kind, factor = header.get(f"{name}.rope.scaling.type", str) or "none", header.get(f"{name}.rope.scaling.factor", float)
    if factor is None and (old := header.get(f"{name}.rope.scale_linear", float)) is not None:
        kind, factor = "linear", old
    if kind not in ("none", "linear"):
        raise header.error(
            f"{name}.rope.scaling.type is {kind!r}: expected none or linear; use the Hugging Face directory of the model"
        )
    scaled = kind == "linear" and factor not in (None, 0.0, 1.0)
    if FREQUENCIES in header.tensors:
        if scaled:
            raise header.error(f"both {FREQUENCIES} and {name}.rope.scaling.type are there: expected one of them")
        return _llama3(header, base, head_dim)
    return (
        {"rope_type": "linear", "rope_theta": base, "factor": factor}
        if scaled
        else {"rope_type": "default", "rope_theta": base}
    )


def divisors(base: float, head_dim: int, factor: float, low: float, high: float, original: int) -> Float32Array:
    """Return the number by which Llama 3's scaling divides each frequency, [head_dim / 2] float32."""
    found: list[float] = []
    for index in range(head_dim // 2):
        wavelength = 2 * math.pi * base ** (2 * index / head_dim)
        smooth = (original / wavelength - low) / (high - low)
        found.append(1 / ((1 - min(1.0, max(0.0, smooth))) / factor + min(1.0, max(0.0, smooth))))
    return np.asarray(found, np.float32)


def _llama3(header: GgufHeader, base: float, head_dim: int) -> dict[str, Any]:
    tensor = header.tensors[FREQUENCIES]
    if tensor.type_name != "F32" or tensor.shape != (head_dim // 2,):
        raise header.error(f"{FREQUENCIES} is {tensor.type_name}{list(tensor.shape)}: expected F32[{head_dim // 2}]")
    with header.path.open("rb") as file:
        file.seek(tensor.start)
        held = np.frombuffer(file.read(tensor.num_bytes), "<f4")
    if not np.isfinite(held).all() or held.min() <= 0:
        raise header.error(f"{FREQUENCIES} holds numbers that divide nothing; fetch the file again")
    if np.allclose(held, 1, rtol=_TOLERANCE):
        return {"rope_type": "default", "rope_theta": base}
    for original, (low, high) in itertools.product([2**power for power in range(13, 18)] + [4096, 2048], [(1.0, 4.0)]):
        factor = float(held.max())
        if np.allclose(divisors(base, head_dim, factor, low, high, original), held, rtol=_TOLERANCE):
            return {
                "rope_type": "llama3",
                "rope_theta": base,
                "factor": factor,
                "low_freq_factor": low,
                "high_freq_factor": high,
                "original_max_position_embeddings": original,
            }
    raise header.error(
        f"{FREQUENCIES} is not the scaling of Llama 3 for any known length; use the Hugging Face directory of the model"
    )
