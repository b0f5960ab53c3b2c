"""The KV cache: one row per sequence, kept after the sequence finishes and found again by its tokens.

Invariant: the first `lengths[r]` positions of row `r` hold the keys and values of `tokens[r, :lengths[r]]`, all computed by
the weights of the row's epoch, and only rows of the current epoch and the request's cache key are ever matched. The one
exception is a row that keeps running through an `in_place` weight update: it mixes keys of both weights, keeps its former
epoch, and so is never shared.

A row of an open session is overwritten only when every other free row is one, too. Then the newest session loses its row:
with more sessions than rows, the oldest keep their prefixes and end, where the least recently used order would keep none.

Rows have room for the longest context from the start, but only what is written takes memory on a CPU: the system gives a
page of zeros at its first use. What changes keys and values waits in order until `data` is asked for, as the thread does
that computes; the state of rows changes at once.
"""

from __future__ import annotations

import math
import mmap
import os
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agentrl.errors import ConfigError
from agentrl.inference.backend import SPARE_ROWS
from agentrl.servers.embedded.spec import ServedSpec
from agentrl.types import BoolArray, Int32Array

_MAX_SESSIONS: Final = 65_536
"""Open sessions that are remembered; the oldest is closed for another one."""
_PATIENCE: Final = 8
"""Turns that others end, for each row, until a session without a call counts as closed: its client may be gone."""
_NEVER: Final = np.iinfo(np.int64).max


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixMatch:
    """A row whose tokens share a prefix with a request's."""

    row: int
    length: int
    """Shared tokens whose keys and values are computed."""
    coming: int
    """Shared tokens whose keys and values are computed once the row's own prefill ends."""


class KVCache:
    """Keys and values of `num_rows` sequences of at most `max_context` tokens."""

    def __init__(
        self, spec: ServedSpec, *, num_rows: int, max_context: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.num_rows = num_rows
        self.max_context = max_context
        self.device, self.dtype = device, dtype
        self.epoch = 0
        self._data = _zeros((spec.num_layers, 2, num_rows, spec.num_kv_heads, max_context, spec.head_dim), device, dtype)
        self._changes = deque[Callable[[], object]]()
        self.tokens: Int32Array = np.zeros((num_rows, max_context), np.int32)
        self.lengths: NDArray[np.int64] = np.zeros(num_rows, np.int64)
        """[rows]: positions computed."""
        self.known: NDArray[np.int64] = np.zeros(num_rows, np.int64)
        """[rows]: tokens known; keys beyond `lengths` are not computed yet."""
        self.owned: BoolArray = np.zeros(num_rows, np.bool_)
        """[rows]: whether a running sequence has the row."""
        keys = np.arange(spec.num_kv_heads) * max_context
        self.head_offsets: NDArray[np.int64] = np.concatenate((keys, keys + num_rows * spec.num_kv_heads * max_context))
        """[2K]: distance, in units of D elements, of each key and value head from a row's first element."""
        self._epochs: NDArray[np.int64] = np.zeros(num_rows, np.int64)
        self._keys: NDArray[np.int64] = np.zeros(num_rows, np.int64)
        self._key_ids = {("", ""): 0}
        self._next_key = 1
        self.dropped = 0
        """Times that an open session lost a prefix to another request, with weights unchanged."""
        self._open: dict[str, int] = {}
        """Number of each open session, in the order of opening, from 1."""
        self._opened = 0
        self._sessions: NDArray[np.int64] = np.zeros(num_rows, np.int64)
        """[rows]: number of the open session that the row belongs to; 0: of none."""
        self._used: NDArray[np.int64] = np.zeros(num_rows, np.int64)
        self._clock = 0

    @property
    def data(self) -> Tensor:
        """Return keys and values, [layers, 2, rows, K, max_context, D], after the changes that wait. One thread asks."""
        while self._changes:
            self._changes.popleft()()
        return self._data

    def match(self, ids: Int32Array, limit: int, key: tuple[str, str] = ("", "")) -> PrefixMatch | None:
        """Return the row of the same cache key that shares the longest prefix of `ids[:limit]`, or None."""
        fresh = (self._epochs == self.epoch) & (self.known > 0) & (self._keys == self._key_id(key))
        candidates = np.flatnonzero(fresh)
        start, width = 0, 64
        best, best_length = -1, 0
        while len(candidates) and start < limit:
            end = min(start + width, limit, self.max_context)
            if end <= start:
                break
            equal = self.tokens[candidates, start:end] == ids[start:end]
            equal &= np.arange(start, end) < self.known[candidates, None]
            shared = np.where(equal.all(1), end - start, equal.argmin(1))
            top = int(shared.argmax())
            if shared[top] == 0:
                break
            # Among equals prefer the longest computed prefix, then a row without an owner.
            ties = candidates[shared == shared[top]]
            order = np.lexsort((self.owned[ties], -np.minimum(self.lengths[ties], limit)))
            best, best_length = int(ties[order[0]]), start + int(shared[top])
            candidates = candidates[shared == end - start]
            start, width = end, width * 4
        if best < 0:
            return None
        return PrefixMatch(row=best, length=min(best_length, int(self.lengths[best])), coming=best_length)

    def claim(
        self, ids: Int32Array, match: PrefixMatch | None, key: tuple[str, str] = ("", ""), session: str = ""
    ) -> tuple[int, int]:
        """Give a free row to a sequence that will hold `ids`, and keep or copy its cached prefix there.

        `session` is the id of the sequence's session, which this opens; empty: it has none.

        Returns:
            The row, and the number of leading `ids` whose keys and values it already holds.
        """
        reused = match.length if match is not None else 0
        number = self._open_session(session) if session else 0
        if match is not None and self._may_continue(match, number):
            row = match.row
        else:
            row = self._victim(keep=match.row if match is not None else -1)
            self.dropped += bool(self._sessions[row] and self.lengths[row] and self._epochs[row] == self.epoch)
            if match is not None and reused:
                self._begin_copy(match.row, row, reused)
        self.tokens[row, : len(ids)] = ids
        self.lengths[row], self.known[row] = reused, len(ids)
        self.owned[row], self._epochs[row], self._keys[row] = True, self.epoch, self._key_id(key)
        self._sessions[row] = number
        return row, reused

    @property
    def num_sessions(self) -> int:
        """Return how many sessions are open."""
        return len(self._open)

    def close_session(self, session: str) -> None:
        """Give back the rows of a session; their prefixes can be matched until they are overwritten."""
        number = self._open.pop(session, 0)
        if number:
            self._sessions[self._sessions == number] = 0

    def release(self, row: int) -> None:
        """Take the row from its sequence; its computed prefix can still be matched."""
        self.owned[row] = False
        # Tokens beyond `lengths` have no keys yet, and no later request may count on them.
        self.known[row] = self.lengths[row]
        self._clock += 1
        self._used[row] = self._clock

    def erase(self, row: int) -> None:
        """Zero a row whose values are not finite, so that they cannot reach its next owner through the mask."""
        self._changes.append(lambda: self._data[:, :, row].zero_())
        self.lengths[row] = self.known[row] = 0

    def flush(self) -> None:
        """Forget every row that no sequence owns."""
        self.lengths[~self.owned] = self.known[~self.owned] = 0

    def next_epoch(self) -> None:
        """Weights changed: no row computed so far is matched any more."""
        self.epoch += 1

    def swap(self, a: int, b: int) -> None:
        """Exchange two rows and their state."""
        self._changes.append(partial(self._exchange, a, b, int(max(self.lengths[a], self.lengths[b]))))
        arrays = (self.tokens, self.lengths, self.known, self.owned, self._epochs, self._keys, self._sessions, self._used)
        for array in arrays:
            array[[a, b]] = array[[b, a]]

    def _begin_copy(self, source: int, row: int, length: int) -> None:
        self._changes.append(partial(self._copy, source, row, length))

    def _copy(self, source: int, row: int, length: int) -> None:
        self._data[:, :, row, :, :length] = self._data[:, :, source, :, :length]

    def _exchange(self, a: int, b: int, length: int) -> None:
        held = self._data[:, :, a, :, :length].clone()
        self._data[:, :, a, :, :length] = self._data[:, :, b, :, :length]
        self._data[:, :, b, :, :length] = held

    def _open_session(self, session: str) -> int:
        number = self._open.get(session)
        if number is None:
            # A client that never closes its sessions must not fill the table; the oldest goes first.
            if len(self._open) == _MAX_SESSIONS:
                self.close_session(next(iter(self._open)))
            self._opened += 1
            number = self._open[session] = self._opened
        return number

    def _may_continue(self, match: PrefixMatch, session: int) -> bool:
        """Return whether a sequence of `session` takes the row itself, most of which it needs, instead of a copy."""
        row = match.row
        others = self._sessions[row] not in (0, session)
        return not self.owned[row] and not others and 2 * match.length >= int(self.lengths[row])

    def _key_id(self, key: tuple[str, str]) -> int:
        """Return the number of a cache key; forget the keys that no row has."""
        number = self._key_ids.get(key)
        if number is None:
            # Each adapter and salt makes a new key; without this the table would grow with every version.
            held = set(self._keys.tolist())
            self._key_ids = {known: id_ for known, id_ in self._key_ids.items() if id_ in held or not id_}
            number = self._key_ids[key] = self._next_key
            self._next_key += 1
        return number

    def _victim(self, keep: int) -> int:
        """Return the free row to overwrite: an empty or outdated one, else the least recently used, sessions' rows last."""
        # A session that has not been used for long has probably ended without a word, and loses its privilege.
        held = (self._sessions > 0) & (self._clock - self._used <= _PATIENCE * self.num_rows)
        age = np.where(held, _NEVER - 2 - self._sessions, self._used)
        age = np.where((self.lengths == 0) | (self._epochs != self.epoch), -1, age)
        age = np.where(self.owned, _NEVER, age)
        # The row that is about to be copied is the last choice, as long as there is another free one.
        if keep >= 0 and not self.owned[keep] and np.count_nonzero(~self.owned) > 1:
            age[keep] = _NEVER - 1
        return int(age.argmin())


def _zeros(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return zeros, not garbage: masked positions are multiplied by probability 0, and 0 * NaN is NaN.

    On a CPU they are pages that take memory once they are written, where torch would write them all.
    """
    if device.type != "cpu":
        return torch.zeros(shape, device=device, dtype=dtype)
    pages = mmap.mmap(-1, max(1, math.prod(shape) * dtype.itemsize), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):  # of 2 MiB, each of which holds positions of many rows
        pages.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(pages, dtype=dtype, count=math.prod(shape)).reshape(shape)


def count_rows(max_running: int) -> int:
    """Return the rows of a cache whose memory suffices: one for each running sequence, and a few for prefixes."""
    return max_running + min(max_running, SPARE_ROWS)


def plan_rows(
    spec: ServedSpec, *, max_running: int, max_context: int, device: torch.device, dtype: torch.dtype, memory_fraction: float
) -> int:
    """Return how many rows fit in `memory_fraction` of the device's memory, at most `count_rows`."""
    row_bytes = 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * max_context * dtype.itemsize
    if device.type == "cuda":
        total = torch.cuda.mem_get_info(device)[0]
    else:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    fit = int(total * memory_fraction) // row_bytes
    if fit < 1:
        raise ConfigError(
            f"one sequence of {max_context} tokens needs {row_bytes / 2**20:.0f} MiB of KV cache, "
            f"over {memory_fraction:.0%} of {total / 2**20:.0f} MiB on {device}; "
            "lower max_context_tokens or raise the fraction"
        )
    return min(fit, count_rows(max_running))
