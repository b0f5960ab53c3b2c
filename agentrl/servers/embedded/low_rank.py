"""LoRA adapters of the embedded engine: read from PEFT's files, fused like the weights, several of them in one batch.

Source: Hu et al. 2021 (arXiv 2106.09685): a layer adds `scale * B (A x)`, with A [rank, in] and B [out, rank].

Invariant: a sequence has one adapter from its first token to its last, also where the adapter is unloaded meanwhile. A
digest is that of the memory that the forward pass reads. An adapter of another base is never loaded.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

import torch
from safetensors.torch import load_file
from torch import Tensor

from agentrl.errors import ConfigError
from agentrl.servers.embedded.spec import ModelSpec
from agentrl.servers.embedded.weights import held_checksum
from agentrl.weights.model_files import model_tensors
from agentrl.weights.peft_files import (
    ADAPTER_BASE_FILE,
    ADAPTER_WEIGHTS_FILE,
    AdapterBase,
    adapted_module,
    base_digest,
    check_base,
    peft_name,
    read_adapter,
    read_adapter_config,
)
from agentrl.weights.tensors import RawTensor

Part = Literal["qkv", "out", "gate_up", "down"]
_MODULES: Final[Mapping[Part, tuple[str, ...]]] = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "out": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}
"""Modules of a layer that one matrix product computes, in the order of its outputs."""
_STORED: Final = frozenset({torch.float32, torch.float16, torch.bfloat16})


@dataclass(frozen=True, slots=True, eq=False)
class LowRank:
    """The adapters of the modules that one matrix product computes."""

    inner: Tensor
    """[ranks, in]: A of each adapted module, one below the other."""
    outer: Tensor
    """[out, ranks]: B of each adapted module in its rows and columns, else 0."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ServedAdapter:
    """An adapter in memory."""

    name: str
    path: str
    scale: float
    layers: tuple[Mapping[Part, LowRank], ...]
    named: Mapping[str, Tensor]
    """Views of the matrices, by PEFT's names."""
    file_types: Mapping[str, torch.dtype]
    serial: int = field(default_factory=itertools.count().__next__)
    """Unique in this process, so that keys and values of a former adapter of the same name are never matched."""

    def checksums(self) -> dict[str, str]:
        """Return `held_checksum` of each matrix, by PEFT's name."""
        return {name: held_checksum(name, tensor, self.file_types[name]) for name, tensor in self.named.items()}


@dataclass(frozen=True, slots=True, eq=False)
class AdapterTokens:
    """The flat tokens of a step that one adapter computes."""

    adapter: ServedAdapter
    tokens: Tensor | None
    """[n] int64; None: all."""


def add_low_rank(out: Tensor, x: Tensor, adapters: Sequence[AdapterTokens], layer: int, part: Part) -> None:
    """Add to `out`, [N, out], what each adapter makes of its tokens of the input `x`, [N, in]."""
    for each in adapters:
        pair = each.adapter.layers[layer].get(part)
        if pair is None:
            continue
        if each.tokens is None:
            out.addmm_(x @ pair.inner.t(), pair.outer.t(), alpha=each.adapter.scale)
        else:
            added = (x[each.tokens] @ pair.inner.t()) @ pair.outer.t()
            out.index_add_(0, each.tokens, added, alpha=each.adapter.scale)


def group_by_adapter(
    owners: Sequence[ServedAdapter | None], counts: Sequence[int], device: torch.device
) -> tuple[AdapterTokens, ...]:
    """Return the adapters of a step whose flat tokens are `counts[i]` of `owners[i]`, one after the other."""
    places: dict[ServedAdapter | None, list[int]] = {}
    at = 0
    for owner, count in zip(owners, counts, strict=True):
        places.setdefault(owner, []).extend(range(at, at + count))
        at += count
    if len(places) == 1:
        return tuple(AdapterTokens(adapter, None) for adapter in places if adapter is not None)
    return tuple(
        AdapterTokens(adapter, torch.tensor(tokens, dtype=torch.int64, device=device))
        for adapter, tokens in places.items()
        if adapter is not None
    )


def read_served_adapter(
    name: str, path: Path, spec: ModelSpec, *, base: Path, device: torch.device, dtype: torch.dtype
) -> ServedAdapter:
    """Return the adapter in `path` for the model in `base`.

    Raises:
        ConfigError: it cannot be read, changes what the model does not have, or was trained on another base.
    """
    config, raw = read_adapter_config(path), read_adapter(path)
    if (path / ADAPTER_BASE_FILE).is_file():
        check_base(path, AdapterBase(str(base), base_digest(model_tensors(base))))
    builder = _AdapterBuilder(raw, load_file(path / ADAPTER_WEIGHTS_FILE), spec, path, device, dtype)
    layers = tuple(builder.layer(index) for index in range(spec.num_layers))
    if builder.rest:
        module = adapted_module(sorted(builder.rest)[0])
        raise ConfigError(
            f"{path}: the adapter changes {module and module[0]}, which {spec.architecture} does not have here"
        )
    return ServedAdapter(
        name=name, path=str(path), scale=config.scale, layers=layers, named=builder.named, file_types=builder.types
    )


class _AdapterBuilder:
    def __init__(
        self,
        raw: Mapping[str, RawTensor],
        tensors: Mapping[str, Tensor],
        spec: ModelSpec,
        path: Path,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.rest = set(raw)
        self.named: dict[str, Tensor] = {}
        self.types = {name: tensor.dtype for name, tensor in tensors.items()}
        self._tensors, self._spec, self._path = tensors, spec, path
        self._device, self._dtype = device, dtype

    def layer(self, index: int) -> dict[Part, LowRank]:
        spec, factors = self._spec, dict[Part, LowRank]()
        queries, keys = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        hidden, inner = spec.hidden_size, spec.intermediate_size
        sizes: Mapping[Part, tuple[int, tuple[int, ...]]] = {
            "qkv": (hidden, (queries, keys, keys)),
            "out": (queries, (hidden,)),
            "gate_up": (hidden, (inner, inner)),
            "down": (inner, (hidden,)),
        }
        for part, (inputs, outputs) in sizes.items():
            names = [f"model.layers.{index}.{module}" for module in _MODULES[part]]
            if any(peft_name(name, "A") in self.rest for name in names):
                factors[part] = self._fused(names, inputs, outputs)
        return factors

    def _fused(self, names: Sequence[str], inputs: int, outputs: Sequence[int]) -> LowRank:
        pairs = {name: self._pair(name, inputs, rows) for name, rows in zip(names, outputs, strict=True)}
        ranks = {name: 0 if pair is None else len(pair[0]) for name, pair in pairs.items()}
        total, device, dtype = sum(ranks.values()), self._device, self._dtype
        fused = LowRank(
            torch.zeros(total, inputs, device=device, dtype=dtype),
            torch.zeros(sum(outputs), total, device=device, dtype=dtype),
        )
        row = column = 0
        for (name, pair), rows in zip(pairs.items(), outputs, strict=True):
            if pair is not None:
                end = column + ranks[name]
                self.named[peft_name(name, "A")] = fused.inner[column:end].copy_(pair[0])
                self.named[peft_name(name, "B")] = fused.outer[row : row + rows, column:end].copy_(pair[1])
                column = end
            row += rows
        return fused

    def _pair(self, name: str, inputs: int, outputs: int) -> tuple[Tensor, Tensor] | None:
        first, second = peft_name(name, "A"), peft_name(name, "B")
        if first not in self.rest:
            return None
        a, b = self._tensors[first], self._tensors.get(second)
        if b is None or a.shape[1] != inputs or b.shape != (outputs, len(a)):
            shapes = f"{list(a.shape)} and {'nothing' if b is None else list(b.shape)}"
            raise ConfigError(
                f"{self._path}: {name} has matrices {shapes}; the model needs [r, {inputs}] and [{outputs}, r]"
            )
        for matrix, tensor in ((first, a), (second, b)):
            if tensor.dtype not in _STORED or not bool(torch.isfinite(tensor).all()):
                raise ConfigError(f"{self._path}: {matrix} ({tensor.dtype}) holds values that are not finite floats")
        self.rest -= {first, second}
        return a, b
