"""The rows of the engine's cache as a cache of transformers, and attention over them.

A module of transformers gets its keys and values from the cache that it is given. Here that cache is a view of rows: each
sequence has one, and the whole of its context stays there also where a layer attends within a window, so nothing that a
request may need again is dropped. Masks, windows, scales and soft caps are those of the module.

A layer with a recurrent state has one state for all tokens of its row. Each row has two places for it: a step reads the one
of the row's length and writes the other, so a step that is discarded leaves the state as it was.

Legend: P rows of a part, C its tokens a row, L longest context, H heads, K heads of keys and values, D their size.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.cache_utils import Cache, CacheLayerMixin, LinearAttentionLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from agentrl.errors import ConfigError
from agentrl.servers.embedded.cache import KVCache, PrefixMatch
from agentrl.servers.embedded.spec import ServedSpec
from agentrl.types import Int32Array

ROWS_ATTENTION: Final = "agentrl_rows"
"""Name under which transformers finds the attention. Without a mask of that name, transformers makes none."""
_BEYOND_SDPA: Final = ("softcap", "s_aux", "position_bias")
"""Options of attention that torch's kernels do not compute; the module's own function does."""


def rows_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    sliding_window: int | None = None,
    **more: Any,  # noqa: ANN401 - transformers' options
) -> tuple[Tensor, Tensor | None]:
    """Return attention, [P, C, H, D], by the function that the module itself would use.

    Args:
        module: the layer.
        query: [P, H, C, D].
        key: [P, K, L, D].
        value: [P, K, L, D].
        mask: [P, 1, C, L]: 0 where a token attends to all before it, -inf elsewhere.
        sliding_window: tokens that the layer attends to, its own among them; None: all.
        more: further options, as the module gives them.
    """
    if sliding_window is not None and key.shape[2] > sliding_window:
        places = torch.arange(key.shape[2], device=mask.device)
        own = (mask == 0).sum(-1, keepdim=True) - 1
        mask = mask.masked_fill(places <= own - sliding_window, -torch.inf)
    if any(more.get(name) is not None for name in _BEYOND_SDPA):
        eager: Callable[..., tuple[Tensor, Tensor | None]] = vars(sys.modules[type(module).__module__])[
            "eager_attention_forward"
        ]
        return eager(module, query, key, value, mask, sliding_window=sliding_window, **more)
    return sdpa_attention_forward(module, query, key, value, mask, **more)


AttentionInterface.register(ROWS_ATTENTION, rows_attention)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowPart:
    """Tokens of a step that the module computes in one call: as many of each of its rows, padded on the right."""

    ids: Tensor
    """[P, C] int64."""
    positions: Tensor
    """[P, C] int64."""
    mask: Tensor
    """[P, 1, C, L], as `rows_attention` takes it."""
    rows: slice | Tensor
    """The rows: neighbors, or [P] int64."""
    context: int
    """L."""
    tokens: Tensor
    """[n] int64: flat tokens of the step."""
    places: Tensor | None
    """[n] int64: their places in the flattened P x C; None: all, in order."""
    written_rows: Tensor
    """[n] int64: the rows of these tokens."""
    written_at: Tensor
    """[n] int64: their positions."""
    read_states: tuple[Tensor, Tensor] | None = None
    """[P] int64 twice: place and row of the states before; None: the sequences begin, or there are no states."""
    write_states: tuple[Tensor, Tensor] | None = None
    """[P] int64 twice: place and row of the states after."""


class _KeysAndValues(CacheLayerMixin):
    """The keys and values of one layer, for the rows of a part."""

    is_sliding = False

    def __init__(self, part: RowPart, data: Tensor) -> None:
        super().__init__()
        self._part, self._data = part, data  # [2, rows, K, max_context, D]
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        del key_states, value_states

    def update(self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
        """Write [P, K, C, D] keys and values to their rows; return those of the whole context, [P, K, L, D]."""
        part, data = self._part, self._data
        for held, new in zip(data, (key_states, value_states), strict=True):
            if new.shape[1] != held.shape[1] or new.shape[3] != held.shape[3]:
                raise ConfigError(
                    f"a layer has {new.shape[1]} key heads of {new.shape[3]}, others {held.shape[1]} of {held.shape[3]}; "
                    "the embedded server computes models whose layers are alike; use inference.backend: sglang"
                )
            flat = new.transpose(1, 2).flatten(0, 1)
            held[part.written_rows, :, part.written_at] = flat if part.places is None else flat[part.places]
        whole = data[..., : part.context, :]
        keys, values = whole[:, part.rows] if isinstance(part.rows, slice) else whole.index_select(1, part.rows)
        return keys, values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        del query_length
        return self._part.context, 0

    def get_seq_length(self) -> int:
        return self._part.context - self._part.ids.shape[1]

    def get_max_length(self) -> int:
        return self._data.shape[3]


class RowStates:
    """The states of the recurrent layers, two of each row; a layer's memory is taken when it is first written."""

    def __init__(self, num_rows: int) -> None:
        self._num_rows = num_rows
        self._held: dict[tuple[int, str], Tensor] = {}

    def layer(self, index: int, part: RowPart) -> LinearAttentionLayer:
        """Return the layer of a cache with the states before `part`."""
        layer = LinearAttentionLayer()
        if part.read_states is None:
            return layer
        for kind in ("conv", "recurrent"):
            held = self._held.get((index, kind))
            if held is None:
                continue
            before = held[part.read_states]
            vars(layer)[f"{kind}_states"][0] = before
            vars(layer)[f"is_{kind}_states_initialized"][0] = True
            if kind == "conv":
                layer.conv_kernel_size[0] = before.shape[-1]
                layer.dtype, layer.device = before.dtype, before.device
        layer.has_previous_state[0] = True
        return layer

    def store(self, index: int, part: RowPart, layer: LinearAttentionLayer) -> None:
        """Keep the states after `part`."""
        assert part.write_states is not None
        for kind in ("conv", "recurrent"):
            after: Tensor | None = vars(layer)[f"{kind}_states"][0]
            if after is None:
                continue
            key = (index, kind)
            if key not in self._held:
                self._held[key] = after.new_zeros((2, self._num_rows, *after.shape[1:]))
            self._held[key][part.write_states] = after

    def copy(self, source: int, row: int) -> None:
        for held in self._held.values():
            held[:, row] = held[:, source]

    def exchange(self, a: int, b: int) -> None:
        for held in self._held.values():
            held[:, [a, b]] = held[:, [b, a]]


def rows_cache(part: RowPart, data: Tensor, states: RowStates | None, recurrent: tuple[bool, ...]) -> Cache:
    """Return the cache of a call for `part`; `recurrent` says of each layer whether it has a state in place of keys."""
    layers: list[Any] = []
    at = 0
    for index, has_state in enumerate(recurrent):
        if has_state:
            assert states is not None
            layers.append(states.layer(index, part))
        else:
            layers.append(_KeysAndValues(part, data[at]))
            at += 1
    return Cache(layers=layers)


def store_states(part: RowPart, cache: Cache, states: RowStates) -> None:
    """Keep the states that a call for `part` has left in its cache."""
    for index, layer in enumerate(cache.layers):
        if isinstance(layer, LinearAttentionLayer):
            states.store(index, part, layer)


class StatefulCache(KVCache):
    """A cache of rows with recurrent states: a prefix is matched only where a row's state is that of its whole length."""

    def __init__(
        self, spec: ServedSpec, *, num_rows: int, max_context: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        super().__init__(spec, num_rows=num_rows, max_context=max_context, device=device, dtype=dtype)
        self.states = RowStates(num_rows)
        self._state_at: NDArray[np.int64] = np.full((2, num_rows), -1, np.int64)
        """[2, rows]: tokens that each place's state has seen."""

    def next_states(self, rows: NDArray[np.int64], ends: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the places, [n] twice, of the states of `rows` before a step that ends at `ends`, and after it."""
        self._state_at[:, rows[self.lengths[rows] == 0]] = -1  # what a former sequence left
        before = (self._state_at[1, rows] == self.lengths[rows]).astype(np.int64)
        self._state_at[1 - before, rows] = ends
        return before, 1 - before

    def match(self, ids: Int32Array, limit: int, key: tuple[str, str] = ("", "")) -> PrefixMatch | None:
        """Return the row whose whole computed prefix is the longest that begins `ids[:limit]`, or None."""
        fresh = (self._epochs == self.epoch) & (self._keys == self._key_id(key)) & (self.lengths > 0)
        best = -1
        for row in np.flatnonzero(fresh & (self.lengths <= limit)).tolist():
            length = int(self.lengths[row])
            longer = best < 0 or length > self.lengths[best]
            if longer and np.array_equal(self.tokens[row, :length], ids[:length]):
                best = row
        if best < 0:
            return None
        length = int(self.lengths[best])
        return PrefixMatch(row=best, length=length, coming=length)

    def erase(self, row: int) -> None:
        super().erase(row)
        self._state_at[:, row] = -1

    def swap(self, a: int, b: int) -> None:
        super().swap(a, b)
        self._changes.append(partial(self.states.exchange, a, b))
        self._state_at[:, [a, b]] = self._state_at[:, [b, a]]

    def _begin_copy(self, source: int, row: int, length: int) -> None:
        super()._begin_copy(source, row, length)
        self._changes.append(partial(self.states.copy, source, row))
        self._state_at[:, row] = self._state_at[:, source]
