"""Attention within a row that is a tree of tokens, in one kernel of FlexAttention that skips what no token sees.

Invariant: a token sees those before it whose subtree holds it, so the row needs no more than the end of each subtree. Blocks
of the row that see nothing of each other are not computed, and those that see all are computed without a mask.

Source: Dong et al. 2024, "Flex Attention" (arXiv 2412.05496).

Legend: N tokens of the row, H query heads, K heads of keys and values, D their size.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

BLOCK = 128
"""Tokens of a block, on both sides."""
LEAST_SIZE = 16
"""Smallest D that the compiled kernel takes."""


def tree_mask(ends: NDArray[np.int64], device: torch.device) -> BlockMask | None:
    """Return the mask of a row whose subtrees end at `ends`, [N]; None: it is shorter than a block, which kernels refuse."""
    if len(ends) < BLOCK:
        return None
    blocks = -(-len(ends) // BLOCK)
    padded = np.concatenate([ends, np.repeat(ends[-1:], blocks * BLOCK - len(ends))]).reshape(blocks, BLOCK)
    numbers = np.arange(blocks)
    first, last = numbers * BLOCK, numbers * BLOCK + BLOCK - 1
    before = numbers[None, :] < numbers[:, None]
    whole = before & (padded.min(1)[None, :] > last[:, None])
    partly = (before & (padded.max(1)[None, :] > first[:, None]) & ~whole) | np.eye(blocks, dtype=bool)
    on_device = torch.from_numpy(ends).to(device)

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (query < on_device[key])

    return BlockMask.from_kv_blocks(
        *_block_numbers(partly, device),
        *_block_numbers(whole, device),
        BLOCK_SIZE=BLOCK,
        mask_mod=sees,
        seq_lengths=(len(ends), len(ends)),
    )


def tree_attention(query: Tensor, key: Tensor, value: Tensor, mask: BlockMask, scaling: float | None) -> Tensor:
    """Return [1, H, N, D]: attention by `mask` of `query`, [1, H, N, D], to `key` and `value`, [1, K, N, D]."""
    kernel = _compiled() if query.is_cuda else flex_attention
    grouped = query.shape[1] != key.shape[1]
    return cast("Tensor", kernel(query, key, value, block_mask=mask, scale=scaling, enable_gqa=grouped))


@cache
def _compiled() -> Callable[..., object]:
    # Not compiled, it would make all N x N products.
    return torch.compile(flex_attention, dynamic=True)


def _block_numbers(chosen: NDArray[np.bool_], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return how many blocks each row of `chosen` has, [1, 1, blocks], and their numbers first, [1, 1, blocks, blocks]."""
    counts, order = chosen.sum(1), np.argsort(~chosen, axis=1, kind="stable")
    return tuple(torch.from_numpy(one.astype(np.int32)).to(device)[None, None] for one in (counts, order))  # pyright: ignore[reportReturnType]
