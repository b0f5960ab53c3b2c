"""Turning rows and chunks into the tensors of one forward, with numpy on whole arrays.

Invariant: flat tokens are the decoding rows in ascending order, then each chunk's tokens in order; all index tensors of the
`StepBatch` follow from that one order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agentrl.inference.embedded.cache import KVCache
from agentrl.inference.embedded.model import DecodeRows, PrefillGroup, StepBatch


class Chunk(NamedTuple):
    """Tokens `start` to `end` of a cache row, to be computed in this step."""

    row: int
    start: int
    end: int


def build_batch(
    cache: KVCache, rows: NDArray[np.int64], last_tokens: NDArray[np.int64], chunks: Sequence[Chunk], *, num_kv_heads: int
) -> StepBatch:
    """Return the batch that decodes one token of each of `rows` (ascending) and computes `chunks`.

    Args:
        cache: its `lengths` and `tokens` say where each row stands.
        rows: [B] decoding rows.
        last_tokens: [B] their last sampled tokens, whose keys and values are not in the cache yet.
        chunks: prefill work.
        num_kv_heads: K.
    """
    device = cache.data.device
    ids, positions, token_rows = last_tokens, cache.lengths[rows], rows
    if chunks:
        ids = np.concatenate([ids, *(cache.tokens[c.row, c.start : c.end] for c in chunks)])
        positions = np.concatenate([positions, *(np.arange(c.start, c.end) for c in chunks)])
        token_rows = np.concatenate([rows, np.repeat([c.row for c in chunks], [c.end - c.start for c in chunks])])
    write = (token_rows * (num_kv_heads * cache.capacity) + positions)[:, None] + cache.head_offsets
    return StepBatch(
        ids=_tensor(ids.astype(np.int64, copy=False), device),
        positions=_tensor(positions, device),
        write=_tensor(write.reshape(-1), device),
        decode=_decode_rows(cache, rows, num_kv_heads) if len(rows) else None,
        prefill=_groups(cache, chunks, len(rows)) if chunks else (),
    )


def _tensor(array: NDArray[np.int64], device: torch.device) -> Tensor:
    return torch.from_numpy(array).to(device, non_blocking=True)


def _decode_rows(cache: KVCache, rows: NDArray[np.int64], num_kv_heads: int) -> DecodeRows:
    first, span = int(rows[0]), int(rows[-1] - rows[0]) + 1
    device, dense = cache.data.device, span == len(rows)
    lengths = cache.lengths[first : first + span] + 1
    context = int(lengths.max() if dense else cache.lengths[rows].max() + 1)
    mask = None
    if not dense or lengths.min() != context:
        visible = torch.arange(context, device=device) < _tensor(lengths, device)[:, None]
        mask = torch.zeros(visible.shape, device=device, dtype=cache.data.dtype).masked_fill_(~visible, -torch.inf)
        mask = mask[:, None].expand(span, num_kv_heads, context).reshape(span * num_kv_heads, 1, context)
    return DecodeRows(
        count=len(rows),
        first_row=first,
        span=span,
        index=None if dense else _tensor(rows - first, device),
        context=context,
        mask=mask,
    )


def _groups(cache: KVCache, chunks: Sequence[Chunk], first_token: int) -> list[PrefillGroup]:
    """Group chunks so that none is padded to more than about twice its own length."""
    starts = first_token + np.cumsum([0, *(c.end - c.start for c in chunks)])
    order = sorted(range(len(chunks)), key=lambda i: chunks[i].end - chunks[i].start)
    groups: list[PrefillGroup] = []
    at = 0
    while at < len(order):
        shortest = chunks[order[at]].end - chunks[order[at]].start
        stop = at + 1
        while stop < len(order) and chunks[order[stop]].end - chunks[order[stop]].start <= 2 * shortest + 8:
            stop += 1
        members = order[at:stop]
        groups.append(_group(cache, [chunks[i] for i in members], [int(starts[i]) for i in members]))
        at = stop
    return groups


def _group(cache: KVCache, chunks: list[Chunk], first_tokens: list[int]) -> PrefillGroup:
    device, dtype = cache.data.device, cache.data.dtype
    sizes = np.array([c.end - c.start for c in chunks])
    width, context = int(sizes.max()), max(c.end for c in chunks)
    columns = np.arange(width)
    real = columns < sizes[:, None]
    gather = np.where(real, np.array(first_tokens)[:, None] + columns, 0)
    last_seen = np.array([c.start for c in chunks])[:, None] + columns  # [P, C]
    visible = torch.arange(context, device=device) <= _tensor(last_seen, device)[:, :, None]
    mask = torch.zeros(visible.shape, device=device, dtype=dtype).masked_fill_(~visible, -torch.inf)
    places = np.flatnonzero(real)
    return PrefillGroup(
        rows=chunks[0].row if len(chunks) == 1 else _tensor(np.array([c.row for c in chunks]), device),
        context=context,
        gather=_tensor(gather, device),
        tokens=_tensor(gather.reshape(-1)[places], device),
        places=_tensor(places, device),
        mask=mask[:, None],
    )
