"""Models that transformers computes: its own module for a decoder, behind the engine's rows.

A step is a few calls of the module: one for all rows that decode, and one for each group of chunks of similar length. A
model with recurrent states gets a call for each chunk, because padding would enter the states.

Invariant: the log-probs of the module over rows are those of its own pass over the whole sequence. It is checked when a
model is opened, and a model that fails is refused by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionLayer

from agentrl.errors import ConfigError
from agentrl.servers.embedded.batching import Chunk
from agentrl.servers.embedded.cache import KVCache
from agentrl.servers.embedded.library.module_weights import LibraryWeights, fill
from agentrl.servers.embedded.library.rows import ROWS_ATTENTION, RowPart, StatefulCache, rows_cache, store_states
from agentrl.servers.embedded.low_rank import ServedAdapter
from agentrl.servers.embedded.served_model import StepInputs, StepWork, VersionWeights
from agentrl.servers.embedded.spec import read_ends, read_json
from agentrl.servers.embedded.weights import read_tensors
from agentrl.weights.architectures import rotation_bound
from agentrl.weights.modules import conversions_of, empty_model

_LAYER_TYPES: Final = frozenset({"full_attention", "sliding_attention", "linear_attention"})
_CHECKED_TOKENS: Final = 14
_TOLERANCE: Final = {torch.float32: 1e-4, torch.float16: 0.1, torch.bfloat16: 0.1}
"""Largest mean difference of log-probs between rows and a whole pass, nats; rounding makes some."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LibrarySpec:
    """The facts about a module that the engine around it needs."""

    architecture: str
    model_type: str
    vocab_size: int
    max_positions: int
    eos_ids: frozenset[int]
    num_layers: int
    """Layers that have keys and values."""
    num_kv_heads: int
    head_dim: int
    recurrent: tuple[bool, ...]
    """Of each layer, whether it has a state in place of keys and values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LibraryBatch:
    """The inputs of one step."""

    ids: Tensor
    """[N] int64."""
    parts: Sequence[RowPart]
    cache: KVCache


class LibraryModel:
    """Computes steps with modules of transformers."""

    def __init__(self, spec: LibrarySpec, weights: VersionWeights, dtype: torch.dtype) -> None:
        self.spec, self._dtype = spec, dtype
        self._weights = _as_library(weights)

    @property
    def weights(self) -> VersionWeights:
        return self._weights

    @weights.setter
    def weights(self, weights: VersionWeights) -> None:
        self._weights = _as_library(weights)

    def batch(self, cache: KVCache, work: StepWork) -> LibraryBatch:
        """Return the inputs of a step; see `ServedModel`."""
        rows, chunks = work.rows, work.chunks
        assert not work.adapters, "a model of transformers takes no adapter"
        decoding = [Chunk(row, at, at + 1) for row, at in zip(rows.tolist(), cache.lengths[rows].tolist(), strict=True)]
        ids = [work.last_tokens, *(cache.tokens[chunk.row, chunk.start : chunk.end] for chunk in chunks)]
        flat = np.concatenate(ids).astype(np.int64)
        starts = len(rows) + np.cumsum([0, *(chunk.end - chunk.start for chunk in chunks)])
        parts: list[RowPart] = []
        if decoding:
            parts.append(self._part(cache, decoding, list(range(len(decoding))), flat))
        alone = isinstance(cache, StatefulCache)
        parts.extend(
            self._part(cache, [chunks[i] for i in group], [int(starts[i]) for i in group], flat)
            for group in _calls(chunks, alone=alone)
        )
        return LibraryBatch(ids=_flat_ids(flat, cache.device), parts=parts, cache=cache)

    def hidden(self, batch: StepInputs, cache: Tensor, weights: VersionWeights) -> Tensor:
        """Return the last hidden states of a step; see `ServedModel`."""
        assert isinstance(batch, LibraryBatch), "a step computes the batch that its model made"
        decoder, recurrent = _as_library(weights).module.base_model, self.spec.recurrent
        states = batch.cache.states if isinstance(batch.cache, StatefulCache) else None
        out: Tensor | None = None
        for part in batch.parts:
            rows = rows_cache(part, cache, states, recurrent)
            masks = part.mask if states is None else {"full_attention": part.mask, "linear_attention": None}
            output = decoder(
                input_ids=part.ids, position_ids=part.positions, attention_mask=masks, past_key_values=rows, use_cache=True
            )
            if states is not None:
                store_states(part, rows, states)
            hidden: Tensor = output.last_hidden_state.flatten(0, 1)
            hidden = hidden if part.places is None else hidden[part.places]
            if out is None:
                # The tokens of a part are in the order of the step, so those of an only part are the step's.
                out = hidden if len(batch.parts) == 1 else hidden.new_empty(len(batch.ids), hidden.shape[-1])
            if out is not hidden:
                out[part.tokens] = hidden
        assert out is not None
        return out

    def logits(self, hidden: Tensor, weights: VersionWeights) -> Tensor:
        """Return float32 logits, [n, V], as the module makes them of hidden states, [n, hidden]."""
        return _as_library(weights).logits(hidden).float()

    def _part(self, cache: KVCache, chunks: Sequence[Chunk], starts: Sequence[int], flat: NDArray[np.int64]) -> RowPart:
        """Return the part of `chunks`, whose flat tokens begin at `starts`."""
        device = cache.device
        rows = np.array([chunk.row for chunk in chunks])
        begins, ends = np.array([chunk.start for chunk in chunks]), np.array([chunk.end for chunk in chunks])
        columns = np.arange(int((ends - begins).max()))
        real = columns < (ends - begins)[:, None]
        tokens = np.where(real, np.array(starts)[:, None] + columns, starts[0])  # [P, C]
        positions = np.where(real, begins[:, None] + columns, 0)
        places = np.flatnonzero(real)
        context = int(ends.max())
        at = _flat_ids(positions, device)
        hidden_from = torch.arange(context, device=device) > at[:, :, None]
        mask = torch.zeros(hidden_from.shape, device=device, dtype=self._dtype).masked_fill_(hidden_from, -torch.inf)
        are_neighbors = bool((np.diff(rows) == 1).all())
        read = write = None
        if isinstance(cache, StatefulCache):
            begin = begins[0] == 0
            before, after = cache.next_states(rows, ends)
            read = None if begin else (_flat_ids(before, device), _flat_ids(rows, device))
            write = (_flat_ids(after, device), _flat_ids(rows, device))
        return RowPart(
            ids=_flat_ids(flat[tokens], device),
            positions=at,
            mask=mask[:, None],
            rows=slice(int(rows[0]), int(rows[-1]) + 1) if are_neighbors else _flat_ids(rows, device),
            context=context,
            tokens=_flat_ids(tokens.reshape(-1)[places], device),
            places=None if real.all() else _flat_ids(places, device),
            written_rows=_flat_ids(np.broadcast_to(rows[:, None], real.shape).reshape(-1)[places], device),
            written_at=_flat_ids(positions.reshape(-1)[places], device),
            read_states=read,
            write_states=write,
        )


def _flat_ids(array: NDArray[Any], device: torch.device) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array, np.int64)).to(device, non_blocking=True)


def _calls(chunks: Sequence[Chunk], *, alone: bool) -> list[list[int]]:
    """Return the chunks of each call, by number, so that padding at most about doubles the length of each."""
    order = sorted(range(len(chunks)), key=lambda i: chunks[i].end - chunks[i].start)
    groups: list[list[int]] = []
    shortest = 0
    for number in order:
        length = chunks[number].end - chunks[number].start
        if groups and not alone and length <= 2 * shortest + 8:
            groups[-1].append(number)
        else:
            groups.append([number])
            shortest = length
    return [sorted(group) for group in groups]


def _as_library(weights: VersionWeights) -> LibraryWeights:
    assert isinstance(weights, LibraryWeights), "weights are of the model that computes with them"
    return weights


class LibrarySource:
    """A directory whose model transformers computes.

    Raises:
        ConfigError: it is no dense decoder, or not one that can be computed over rows.
    """

    takes_adapters = False

    def __init__(self, path: Path, device: torch.device, dtype: torch.dtype) -> None:
        self._device, self._dtype = device, dtype
        self._empty = empty_model(path, dtype)
        self._conversions = conversions_of(self._empty)
        self.spec = _spec(path, self._empty)
        self._is_checked = False

    def read(self, path: str) -> LibraryWeights:
        return self._filled(read_tensors(Path(path)), path)

    def build(self, tensors: dict[str, Tensor]) -> LibraryWeights:
        return self._filled(tensors, "the update")

    def model(self, weights: VersionWeights, max_context: int) -> LibraryModel:
        del max_context
        return LibraryModel(self.spec, weights, self._dtype)

    def cache(self, num_rows: int, max_context: int) -> KVCache:
        kind = StatefulCache if any(self.spec.recurrent) else KVCache
        return kind(self.spec, num_rows=num_rows, max_context=max_context, device=self._device, dtype=self._dtype)

    def adapter(self, name: str, path: Path, base: Path) -> ServedAdapter:
        raise ConfigError(
            f"LoRA adapter {name}: {self.spec.architecture} in {base} is computed by transformers' module, which takes no "
            "adapter beside the weights; set sync.adapter: merged"
        )

    def _filled(self, tensors: dict[str, Tensor], origin: str) -> LibraryWeights:
        weights = fill(self._empty, self._conversions, tensors, origin=origin, device=self._device)
        if not self._is_checked:
            self._check(weights, origin)
            self._is_checked = True
        weights.module.set_attn_implementation(ROWS_ATTENTION)
        return weights

    def _check(self, weights: LibraryWeights, origin: str) -> None:
        """Refuse a module whose logits over rows are not those of its own pass; the first weights tell."""
        ids = (np.arange(_CHECKED_TOKENS) * 7 + 3) % self.spec.vocab_size
        with torch.inference_mode():
            whole: Tensor = weights.module(input_ids=_flat_ids(ids[None], self._device), use_cache=False).logits[0].float()
            weights.module.set_attn_implementation(ROWS_ATTENTION)
            try:
                over_rows = self._over_rows(weights, ids)
            except (AttributeError, KeyError, TypeError, ValueError, RuntimeError, ConfigError) as error:
                raise ConfigError(f"{origin}: {self._reason}: {error}") from error
        difference = float((whole.log_softmax(-1) - over_rows.log_softmax(-1)).abs().mean())
        if not difference <= _TOLERANCE[self._dtype]:
            raise ConfigError(f"{origin}: {self._reason}: log-probs differ by {difference:.2g} from those of a whole pass")

    @property
    def _reason(self) -> str:
        return (
            f"the module of {self.spec.architecture} cannot be computed over the rows of the embedded server; use "
            "inference.backend: sglang"
        )

    def _over_rows(self, weights: LibraryWeights, ids: NDArray[np.int64]) -> Tensor:
        """Return the logits of `ids`, computed in two chunks and then token by token beside another row."""
        model, cache = self.model(weights, len(ids)), self.cache(3, len(ids))
        cache.tokens[:, : len(ids)] = ids
        found: list[Tensor] = []

        def step(rows: Sequence[int], *chunks: Chunk, wanted: slice) -> None:
            decoding = np.array(rows, np.int64)
            batch = model.batch(cache, StepWork(decoding, ids[cache.lengths[decoding]], chunks))
            found.append(model.logits(model.hidden(batch, cache.data, weights)[wanted], weights))
            cache.lengths[decoding] += 1
            for chunk in chunks:
                cache.lengths[chunk.row] = chunk.end

        step([], Chunk(2, 0, 5), Chunk(0, 0, 3), wanted=slice(5))
        step([0], Chunk(2, 5, 9), wanted=slice(1, None))
        for _ in ids[9:]:
            step([0, 2], wanted=slice(1, None))
        return torch.cat(found)


def _spec(path: Path, module: PreTrainedModel) -> LibrarySpec:
    """Return the facts about `module`, made of the directory `path`; ConfigError where rows cannot hold its cache."""
    config: Any = module.config
    fields = read_json(path / "config.json")
    kinds = set(getattr(config, "layer_types", None) or ())
    layers = DynamicCache(config=config).layers
    recurrent = tuple(isinstance(layer, LinearAttentionLayer) for layer in layers)
    known = (DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionLayer)
    name = type(module).__name__
    if not kinds <= _LAYER_TYPES or any(type(layer) not in known for layer in layers) or not layers:
        other = sorted(kinds - _LAYER_TYPES) or sorted({type(layer).__name__ for layer in layers})
        raise ConfigError(
            f"{path}: {name} has layers of the kinds {', '.join(other)}, whose cache the embedded server does not hold; use "
            "inference.backend: sglang"
        )
    heads = int(config.num_attention_heads)
    positions = int(config.max_position_embeddings)
    return LibrarySpec(
        architecture=name,
        model_type=str(config.model_type),
        vocab_size=int(config.vocab_size),
        max_positions=min(positions, rotation_bound(fields) or positions),
        eos_ids=read_ends(path),
        num_layers=len(recurrent) - sum(recurrent),
        num_kv_heads=int(getattr(config, "num_key_value_heads", None) or heads),
        head_dim=int(getattr(config, "head_dim", None) or config.hidden_size // heads),
        recurrent=recurrent,
    )
