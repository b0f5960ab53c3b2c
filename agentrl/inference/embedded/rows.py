"""Running sequences and their per-row numbers, kept as arrays so that a step handles all rows at once.

Invariant: `table.owners[r]` is the sequence whose `row` is `r`, and every array of the table at `r` describes it; a swap of
two cache rows swaps both.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from agentrl.inference.embedded.sampler import uniform
from agentrl.inference.embedded.sequences import Sequence
from agentrl.types import BoolArray

_BLOCK: Final = 64
"""Uniform numbers drawn at once for a row: cheaper than drawing one per step."""


@dataclass(slots=True)
class RowTable:
    """Numbers of the running sequences by cache row."""

    num_rows: int
    owners: list[Sequence | None] = field(init=False)
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
    """[rows]: has stop strings or stop tokens of its own."""
    shaped: BoolArray = field(init=False)
    """[rows]: has penalties or a minimum length, which change logits."""

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

    def place(self, sequence: Sequence, row: int, vocab_size: int) -> None:
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
        """Book one more output token of each row."""
        self.last_token[rows] = tokens
        counts = self.count[rows] + 1
        self.count[rows] = counts
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
