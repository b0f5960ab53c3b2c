"""Open a model directory: the forward pass of this package where it computes the model, else transformers' module."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from agentrl.servers.embedded.batching import build_batch
from agentrl.servers.embedded.cache import KVCache
from agentrl.servers.embedded.low_rank import ServedAdapter, read_served_adapter
from agentrl.servers.embedded.model import StepBatch, Transformer
from agentrl.servers.embedded.served_model import ModelSource, StepInputs, StepWork, VersionWeights
from agentrl.servers.embedded.spec import BeyondOwnForward, ModelSpec, read_spec
from agentrl.servers.embedded.weights import ServedWeights, build_weights, load_weights
from agentrl.weights.architectures import check_dense_decoder


class OwnModel:
    """The forward pass of this package, for Llama, Qwen2 and Qwen3."""

    def __init__(self, transformer: Transformer) -> None:
        self._transformer = transformer

    @property
    def spec(self) -> ModelSpec:
        return self._transformer.spec

    @property
    def weights(self) -> VersionWeights:
        return self._transformer.weights

    @weights.setter
    def weights(self, weights: VersionWeights) -> None:
        self._transformer.weights = _own(weights)

    def batch(self, cache: KVCache, work: StepWork) -> StepBatch:
        batch = build_batch(cache, work.rows, work.last_tokens, work.chunks, num_kv_heads=self.spec.num_kv_heads)
        return replace(batch, adapters=work.adapters) if work.adapters else batch

    def hidden(self, batch: StepInputs, cache: Tensor, weights: VersionWeights) -> Tensor:
        assert isinstance(batch, StepBatch), "a step computes the batch that its model made"
        return self._transformer.hidden(batch, cache, _own(weights))

    def logits(self, hidden: Tensor, weights: VersionWeights) -> Tensor:
        return self._transformer.logits(hidden, _own(weights))


def _own(weights: VersionWeights) -> ServedWeights:
    assert isinstance(weights, ServedWeights), "weights are of the model that computes with them"
    return weights


class OwnSource:
    """A directory whose model the forward pass of this package computes."""

    takes_adapters = True

    def __init__(self, spec: ModelSpec, device: torch.device, dtype: torch.dtype) -> None:
        self.spec, self._device, self._dtype = spec, device, dtype

    def read(self, path: str) -> ServedWeights:
        return load_weights(path, self.spec, device=self._device, dtype=self._dtype)

    def build(self, tensors: dict[str, Tensor]) -> ServedWeights:
        return build_weights(tensors, self.spec, origin="the update", device=self._device, dtype=self._dtype)

    def model(self, weights: VersionWeights, max_context: int) -> OwnModel:
        return OwnModel(Transformer(self.spec, _own(weights), max_context=max_context))

    def cache(self, num_rows: int, max_context: int) -> KVCache:
        return KVCache(self.spec, num_rows=num_rows, max_context=max_context, device=self._device, dtype=self._dtype)

    def adapter(self, name: str, path: Path, base: Path) -> ServedAdapter:
        return read_served_adapter(name, path, self.spec, base=base, device=self._device, dtype=self._dtype)


def open_model(path: str, device: torch.device, dtype: torch.dtype) -> ModelSource:
    """Return the model in `path`, computed here where this package can, and else by transformers.

    Raises:
        ConfigError: neither computes it, or its files are damaged.
    """
    check_dense_decoder(Path(path))
    try:
        return OwnSource(read_spec(path), device, dtype)
    except BeyondOwnForward:
        # Imported where it is needed: transformers takes seconds.
        from agentrl.servers.embedded.library.model import LibrarySource

        return LibrarySource(Path(path), device, dtype)
