"""What one step computes: how much prefill, and which rows decode.

Invariant: a step never takes more prefill than fits the time HTTP may wait for the event loop, as measured on this machine,
and decoding rows lie close enough together that at most a quarter of their span is idle.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from agentrl.inference.embedded.cache import KVCache
from agentrl.inference.embedded.rows import RowTable
from agentrl.inference.embedded.sequences import Sequence

_CHUNK: Final = 512
"""Longest prefill chunk of one sequence, tokens: bounds the attention mask."""
_MIN_BUDGET: Final = 64
_MAX_BUDGET: Final = 2048
"""Prefill tokens of one step, whatever the machine's speed."""
_STEP_SECONDS: Final = 0.05
"""Prefill work aimed at per step: how long HTTP may wait for the event loop."""


class Piece(NamedTuple):
    """Tokens `start` to `end` of a sequence, to be prefilled in this step."""

    sequence: Sequence
    start: int
    end: int


class Pace:
    """How many tokens of prefill this machine does in a step's time."""

    def __init__(self) -> None:
        self._seconds_per_token = _STEP_SECONDS / 512

    @property
    def budget(self) -> int:
        """Return the prefill tokens of one step."""
        return int(min(max(_STEP_SECONDS / self._seconds_per_token, _MIN_BUDGET), _MAX_BUDGET))

    def measured(self, tokens: int, seconds: float) -> None:
        """Take note of a step's time; small steps say little and are left out."""
        if tokens >= _MIN_BUDGET:
            self._seconds_per_token += 0.2 * (seconds / tokens - self._seconds_per_token)


def plan_pieces(prefilling: Iterable[Sequence], cache: KVCache, budget: int) -> list[Piece]:
    """Return the prefill work of a step: as many tokens as the budget has, oldest sequence first."""
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
    """Return the decoding rows, ascending, moved together first where over a quarter of their span is idle."""
    rows = np.flatnonzero(table.decoding)
    count = len(rows)
    if count and 3 * (rows[-1] - rows[0] + 1) > 4 * count:
        first = min(int(rows[0]), cache.num_rows - count)
        block = np.arange(first, first + count)
        outside = rows[(rows < first) | (rows >= first + count)]
        for hole, row in zip(block[~table.decoding[block]].tolist(), outside.tolist(), strict=True):
            cache.swap(hole, row)
            table.swap(hole, row)
        rows = block
    return rows
