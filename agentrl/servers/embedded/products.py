"""Products with the weights of a layer, also of bfloat16 on CPUs that multiply bfloat16 slowly.

torch multiplies bfloat16 matrices by fast kernels where the CPU has AVX-512. Elsewhere it takes four times as long as for
float32. There a piece of the weights at a time is copied to float32, into memory that stays in the cache of a core.

Invariant: what is computed from such copies is the float32 sum of all its terms, rounded once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from agentrl.support.processor import multiplies_bfloat16_slowly

_PIECE: Final = 1 << 19
"""Weights that are copied at a time: 2 MiB of float32."""
_LEAST_ROWS: Final = 4
"""For fewer rows a product reads its weights for the most part, and torch's own is as fast or faster."""


Part = tuple[Tensor, Tensor, Tensor, Tensor | None]
"""Queries [n, G, D], keys and values [n, L, D], and a mask [n, 1, L]."""


def _onto(x: Tensor, update: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    out = torch.addmm(x, update, weight.t())
    return out if bias is None else out.add_(bias)


class Products:
    """torch's own products; bound without a call between, which small models would feel."""

    linear = staticmethod(F.linear)
    """Returns `x @ weight.T (+ bias)`, [N, out], of `x` [N, in] and `weight` [out, in]."""
    onto = staticmethod(_onto)
    """Returns `x + update @ weight.T (+ bias)`, [N, out]."""


class WidenedProducts:
    """The same of bfloat16, by float32 copies; of one forward pass at a time."""

    def __init__(self) -> None:
        self._piece = torch.empty(_PIECE)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return `x @ weight.T (+ bias)`, [N, out], of `x` [N, in] and `weight` [out, in]."""
        return F.linear(x, weight, bias) if len(x) < _LEAST_ROWS else self._widened(x, weight, bias, None)

    def onto(self, x: Tensor, update: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return `x + update @ weight.T (+ bias)`, [N, out]."""
        return _onto(x, update, weight, bias) if len(x) < _LEAST_ROWS else self._widened(update, weight, bias, x)

    def parts(self, queries: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Iterator[Part]:
        """Yield the attention of a step in parts along n, in float32; one at a time is in memory."""
        count = max(1, len(self._piece) // (2 * k[0].numel()))
        for start in range(0, len(k), count):
            part = slice(start, start + count)
            yield queries[part].float(), k[part].float(), v[part].float(), None if mask is None else mask[part].float()

    def _widened(self, x: Tensor, weight: Tensor, bias: Tensor | None, onto: Tensor | None) -> Tensor:
        piece, inputs, out = self._piece, x.float(), x.new_empty(len(x), len(weight))
        rows = max(1, len(piece) // weight.shape[1])
        for start in range(0, len(weight), rows):
            end = min(start + rows, len(weight))
            part = weight[start:end]
            held = piece[: part.numel()].view(part.shape) if part.numel() <= len(piece) else part.float()
            product = inputs @ held.copy_(part).t()
            if onto is not None:
                product += onto[:, start:end]
            if bias is not None:
                product += bias[start:end]
            out[:, start:end] = product
        return out


def products_for(weight: Tensor) -> Products | WidenedProducts:
    """Return the products for weights of the type, and on the device, of `weight`."""
    slow = weight.dtype == torch.bfloat16 and weight.device.type == "cpu" and multiplies_bfloat16_slowly()
    return WidenedProducts() if slow else Products()
