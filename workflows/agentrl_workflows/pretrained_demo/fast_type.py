"""The type in which this machine multiplies matrices faster: float32, or bfloat16 where the processor has it.

Without instructions for bfloat16 (AVX512-BF16, AMX), its products take several times as long as those of float32.
"""

from __future__ import annotations

import time
from functools import cache
from typing import Literal

_SHAPE = (64, 576, 1536)
"""Rows, columns and outputs of the product that is timed: an MLP of SmolLM2-135M for 64 requests."""
_TIMES = 20
_GAIN = 1.3
"""bfloat16 has to be this many times as fast: it rounds more."""


@cache
def fast_type() -> Literal["float32", "bfloat16"]:
    """Return the faster type, by the best of some products on one thread; it takes about a tenth of a second."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return "bfloat16" if _seconds(torch.bfloat16) * _GAIN < _seconds(torch.float32) else "float32"
    finally:
        torch.set_num_threads(threads)


def _seconds(dtype: object) -> float:
    import torch

    rows, columns, outputs = _SHAPE
    inputs = torch.ones(rows, columns, dtype=dtype)  # pyright: ignore[reportArgumentType] - torch is imported lazily
    weights = torch.ones(outputs, columns, dtype=dtype)  # pyright: ignore[reportArgumentType]
    best = float("inf")
    for _ in range(_TIMES):
        began = time.perf_counter()
        torch.nn.functional.linear(inputs, weights)
        best = min(best, time.perf_counter() - began)
    return best
