"""The batch of one step: the per-row table of running sequences, the choice of prefill and decode work, and its tensors.

Invariant: `table.owners[r]` is the sequence whose `row` is `r`, and every array of the table describes it at `r`; a swap of
two cache rows swaps both. A step takes no more prefill than `Pace` lets decoding sequences wait for, and at most a quarter
of the span of the decoding rows is idle. The flat tokens of a batch are the decoding rows in ascending
order, then the tokens of each chunk in order; all index tensors of the `StepBatch` follow that order.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agentrl.servers.embedded.cache import KVCache
from agentrl.servers.embedded.model import DecodeRows, PrefillGroup, StepBatch
from agentrl.servers.embedded.sampler import uniform
from agentrl.servers.embedded.sequences import EngineSequence
from agentrl.types import BoolArray

_BLOCK: Final = 64
"""Uniform numbers drawn at once for a row, because drawing one per step costs more."""


@dataclass(slots=True)
class RowTable:
    """The sampling state of the running sequences, by cache row."""

    num_rows: int
    owners: list[EngineSequence | None] = field(init=False)
    decoding: BoolArray = field(init=False)
    """[rows]: prefill is done; one token is sampled each step."""
    last_token: NDArray[np.int64] = field(init=False)
    count: NDArray[np.int64] = field(init=False)
    """[rows]: output tokens so far."""
    limit: NDArray[np.int64] = field(init=False)
    """[rows]: output tokens allowed."""
    temperature: NDArray[np.float32] = field(init=False)
    top_p: NDArray[np.float32] = field(init=False)
    top_k: NDArray[np.int64] = field(init=False)
    min_p: NDArray[np.float32] = field(init=False)
    cut: BoolArray = field(init=False)
    seeds: NDArray[np.uint64] = field(init=False)
    draws: NDArray[np.float64] = field(init=False)
    """[rows, _BLOCK]: uniform numbers of the block of output positions that `count` is in."""
    ignore_eos: BoolArray = field(init=False)
    watched: BoolArray = field(init=False)
    """[rows]: the request has stop strings or stop tokens of its own."""
    shaped: BoolArray = field(init=False)
    """[rows]: the request has penalties or a minimum length, which change logits."""

    def __post_init__(self) -> None:
        count = self.num_rows
        self.owners = [None] * count
        for name in ("decoding", "cut", "ignore_eos", "watched", "shaped"):
            setattr(self, name, np.zeros(count, np.bool_))
        for name in ("last_token", "count", "limit", "top_k"):
            setattr(self, name, np.zeros(count, np.int64))
        for name in ("temperature", "top_p", "min_p"):
            setattr(self, name, np.zeros(count, np.float32))
        self.seeds = np.zeros(count, np.uint64)
        self.draws = np.zeros((count, _BLOCK), np.float64)

    def _arrays(self) -> list[NDArray[Any]]:
        return [
            self.decoding, self.cut, self.ignore_eos, self.watched, self.shaped,
            self.last_token, self.count, self.limit, self.top_k,
            self.temperature, self.top_p, self.min_p, self.seeds, self.draws,
        ]  # fmt: skip

    def place(self, sequence: EngineSequence, row: int, vocab_size: int) -> None:
        """Fill the row with a sequence's numbers; it is not decoding yet."""
        sampling = sequence.request.sampling
        sequence.row = row
        self.owners[row] = sequence
        self.decoding[row] = False
        self.count[row] = len(sequence.progress.output_ids)
        self.limit[row] = sampling.max_new_tokens
        self.temperature[row] = sampling.temperature
        self.top_p[row], self.min_p[row] = sampling.top_p, sampling.min_p
        self.top_k[row] = sampling.top_k if sampling.top_k > 0 else vocab_size
        self.cut[row] = sampling.top_p < 1 or sampling.min_p > 0 or 0 < sampling.top_k < vocab_size
        self.seeds[row] = sequence.seed
        self._draw(np.array([row]))
        self.ignore_eos[row] = sampling.ignore_eos
        self.watched[row] = bool(sequence.stop_ids or sequence.window)
        self.shaped[row] = sequence.penalized or sampling.min_new_tokens > 0

    def advance(self, rows: NDArray[np.int64], tokens: NDArray[np.int64]) -> None:
        """Record one more output token of each row."""
        self.last_token[rows] = tokens
        counts = self.count[rows] + 1
        self.count[rows] = counts
        # Uniform numbers are drawn a block at a time: a call of the generator for each token is what a step would wait
        # for.
        fresh = counts % _BLOCK == 0
        if fresh.any():
            self._draw(rows[fresh])

    def next_draws(self, rows: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the uniform number of each row's next token, [n]."""
        return self.draws[rows, self.count[rows] % _BLOCK]

    def _draw(self, rows: NDArray[np.int64]) -> None:
        positions = self.count[rows, None] // _BLOCK * _BLOCK + np.arange(_BLOCK)
        self.draws[rows] = uniform(self.seeds[rows, None], positions)

    def remove(self, row: int) -> None:
        """Empty the row."""
        sequence = self.owners[row]
        if sequence is not None:
            sequence.row = -1
        self.owners[row] = None
        self.decoding[row] = False

    def swap(self, a: int, b: int) -> None:
        """Exchange two rows."""
        for array in self._arrays():
            array[[a, b]] = array[[b, a]]
        self.owners[a], self.owners[b] = self.owners[b], self.owners[a]
        for row in (a, b):
            sequence = self.owners[row]
            if sequence is not None:
                sequence.row = row


_CHUNK: Final = 512
"""Longest prefill chunk of one sequence, tokens: bounds the attention mask."""
_MIN_BUDGET: Final = 64
_MAX_BUDGET: Final = 2048
"""Most prefill tokens of one step, on any machine."""
_STEP_SECONDS: Final = 0.05
"""Target for the prefill time of a step: decoding sequences wait for it, and a pause discards it."""
_TOKENS_PER_SEQUENCE: Final = 8
"""Prefill tokens for each running sequence that a step takes even if it misses the target."""


class Piece(NamedTuple):
    """Tokens `start` to `end` of a sequence that this step prefills."""

    sequence: EngineSequence
    start: int
    end: int


class Pace:
    """Measures the prefill speed of this machine and sets the budget of a step."""

    def __init__(self) -> None:
        self._seconds_per_token = _STEP_SECONDS / 512

    def budget(self, decoding: int, running: int) -> int:
        """Return the prefill tokens of a step in which `decoding` of the `running` sequences decode.

        A large model misses `_STEP_SECONDS` with any slice, and each slice reads all weights and decodes all rows. So a
        slice is long beside the sequences that run: what one of them waits for, the others need.
        """
        least = max(_MIN_BUDGET, _TOKENS_PER_SEQUENCE * running) if decoding else _CHUNK
        return int(min(max(_STEP_SECONDS / self._seconds_per_token, least), _MAX_BUDGET))

    def measured(self, tokens: int, seconds: float) -> None:
        """Record the time of a step; small steps are ignored, because their overhead dominates."""
        if tokens >= _MIN_BUDGET:
            self._seconds_per_token += 0.2 * (seconds / tokens - self._seconds_per_token)


def plan_pieces(prefilling: Iterable[EngineSequence], cache: KVCache, budget: int) -> list[Piece]:
    """Return the prefill work of a step: at most `budget` tokens, oldest sequence first."""
    pieces: list[Piece] = []
    for sequence in prefilling:
        if budget <= 0:
            break
        start = int(cache.lengths[sequence.row])
        end = min(int(cache.known[sequence.row]), start + min(budget, _CHUNK))
        pieces.append(Piece(sequence, start, end))
        budget -= end - start
    return pieces


def decoding_rows(table: RowTable, cache: KVCache) -> NDArray[np.int64]:
    """Return the decoding rows, ascending, after moving them together if over a quarter of their span is idle."""
    rows = np.flatnonzero(table.decoding)
    count = len(rows)
    # Attention reads one contiguous span of rows; idle ones in it cost as much as used ones, and moving rows costs a
    # copy.
    if count and 3 * (rows[-1] - rows[0] + 1) > 4 * count:
        first = min(int(rows[0]), cache.num_rows - count)
        block = np.arange(first, first + count)
        outside = rows[(rows < first) | (rows >= first + count)]
        for hole, row in zip(block[~table.decoding[block]].tolist(), outside.tolist(), strict=True):
            cache.swap(hole, row)
            table.swap(hole, row)
        rows = block
    return rows


class Chunk(NamedTuple):
    """Tokens `start` to `end` of a cache row that this step computes."""

    row: int
    start: int
    end: int


def build_batch(
    cache: KVCache,
    rows: NDArray[np.int64],
    last_tokens: NDArray[np.int64],
    chunks: Sequence[Chunk],
    *,
    num_kv_heads: int,
) -> StepBatch:
    """Return the batch that decodes one token of each of `rows` (ascending) and computes `chunks`.

    Args:
        cache: its `lengths` and `tokens` give the state of each row.
        rows: [B] decoding rows.
        last_tokens: [B] last sampled tokens of those rows, whose keys and values are not in the cache yet.
        chunks: prefill work.
        num_kv_heads: K.
    """
    device = cache.device
    ids, positions, token_rows = last_tokens, cache.lengths[rows], rows
    if chunks:
        ids = np.concatenate([ids, *(cache.tokens[c.row, c.start : c.end] for c in chunks)])
        positions = np.concatenate([positions, *(np.arange(c.start, c.end) for c in chunks)])
        token_rows = np.concatenate([rows, np.repeat([c.row for c in chunks], [c.end - c.start for c in chunks])])
    write = (token_rows * (num_kv_heads * cache.max_context) + positions)[:, None] + cache.head_offsets
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
    device, dense = cache.device, span == len(rows)
    lengths = cache.lengths[first : first + span] + 1
    context = int(lengths.max() if dense else cache.lengths[rows].max() + 1)
    mask = None
    if not dense or lengths.min() != context:
        visible = torch.arange(context, device=device) < _tensor(lengths, device)[:, None]
        mask = torch.zeros(visible.shape, device=device, dtype=cache.dtype).masked_fill_(~visible, -torch.inf)
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
    """Group chunks so that padding at most about doubles the length of each."""
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
    device, dtype = cache.device, cache.dtype
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
