"""The weights of one policy version: read from safetensors, fused for speed, addressed by their HF names.

Invariant: `named` holds every tensor of the forward pass, under its HF name, as a view of the memory that the forward pass
reads; so a digest of `named` is a digest of the served weights. A `ServedWeights` never changes after loading.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from agentrl.errors import ConfigError
from agentrl.servers.embedded.spec import ModelSpec, read_as
from agentrl.weights.tensors import tensor_checksum

SAFETENSORS_NAMES: Final = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.float64: "F64"}


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """One transformer block; query, key and value (and gate and up) projections are stacked along their outputs."""

    input_norm: Tensor
    qkv: Tensor
    """[(heads + 2 kv_heads) * head_dim, hidden]."""
    qkv_bias: Tensor | None
    qk_norm: Tensor | None
    """[heads + kv_heads, head_dim]."""
    out: Tensor
    out_bias: Tensor | None
    post_norm: Tensor
    gate_up: Tensor
    """[2 * intermediate, hidden]."""
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedWeights:
    """All tensors of one policy version, on one device, in one dtype."""

    embedding: Tensor
    """[vocab, hidden]."""
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor
    head: Tensor
    """[vocab, hidden]; the embedding itself when tied."""
    named: Mapping[str, Tensor]
    file_dtypes: Mapping[str, torch.dtype]
    """The dtypes of the file."""

    def checksums(self) -> dict[str, str]:
        """Return `held_checksum` of each served tensor, by HF name."""
        return {name: held_checksum(name, tensor, self.file_dtypes[name]) for name, tensor in self.named.items()}

    def others(self, taken: Collection[str]) -> dict[str, Tensor]:
        """Return the tensors that an update of `taken` leaves as they are, in the types of their file."""
        kept = {name: tensor.to(self.file_dtypes[name]) for name, tensor in self.named.items() if name not in taken}
        if self.head is self.embedding:
            kept.pop("lm_head.weight", None)  # the same as the embedding, which is among the others or was taken
        return kept


def held_checksum(name: str, tensor: Tensor, stored: torch.dtype) -> str:
    """Return the `tensor_checksum` of a tensor in memory that was read as `stored`.

    It is that of `stored` where memory has all its values and these are what it has, and else that of memory itself: so it
    equals a digest in `agentrl.weights.tensors.held_type` only where memory has what was read, to the last bit.
    """
    held = tensor.detach().to("cpu")
    if torch.promote_types(stored, held.dtype) == held.dtype:
        narrow = held.to(stored)
        held = narrow if torch.equal(narrow.to(held.dtype), held) else held
    data = held.contiguous().view(torch.uint8).numpy().data
    return tensor_checksum(name, SAFETENSORS_NAMES[held.dtype], list(held.shape), data)


def load_weights(path: str | Path, spec: ModelSpec, *, device: torch.device, dtype: torch.dtype) -> ServedWeights:
    """Return the weights in `path` (`model.safetensors`, or the shards its index names), copied to `device`."""
    return build_weights(read_tensors(Path(path)), spec, origin=str(path), device=device, dtype=dtype)


def build_weights(
    tensors: dict[str, Tensor], spec: ModelSpec, *, origin: str, device: torch.device, dtype: torch.dtype
) -> ServedWeights:
    """Return weights made of `tensors`, by HF name, copied to `device`; they are taken out of the dict."""
    return _Builder(tensors, spec, origin, device, dtype).build()


class _Index(msgspec.Struct):
    weight_map: dict[str, str] | None = None


def read_tensors(directory: Path) -> dict[str, Tensor]:
    """Return the tensors of the safetensors files of a HF directory, by name."""
    index = directory / "model.safetensors.index.json"
    if index.exists():
        files = sorted({directory / name for name in (read_as(index, _Index).weight_map or {}).values()})
    else:
        files = [directory / "model.safetensors"]
    tensors: dict[str, Tensor] = {}
    for file in files:
        if not file.is_file():
            raise ConfigError(f"no weights at {file}: expected model.safetensors or the shards of its index")
        try:
            with safe_open(file, framework="pt") as opened:  # pyright: ignore[reportUnknownVariableType]
                for name in opened.keys():  # noqa: SIM118 - not a mapping
                    tensors[str(name)] = opened.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"{file} is not a complete safetensors file: {error}") from error
    return tensors


class _Builder:
    """Takes tensors out of a dict one by one, checks them and fuses them."""

    def __init__(
        self, tensors: dict[str, Tensor], spec: ModelSpec, path: str, device: torch.device, dtype: torch.dtype
    ) -> None:
        self._tensors, self._spec, self._path = tensors, spec, path
        self._device, self._dtype = device, dtype
        self._named: dict[str, Tensor] = {}
        self._file_dtypes: dict[str, torch.dtype] = {}

    def build(self) -> ServedWeights:
        spec = self._spec
        size = (spec.vocab_size, spec.hidden_size)
        embedding = self._take("model.embed_tokens.weight", size)
        layers = tuple(self._layer(f"model.layers.{index}.") for index in range(spec.num_layers))
        final_norm = self._take("model.norm.weight", (spec.hidden_size,))
        head = embedding
        if not spec.tied:
            head = self._take("lm_head.weight", size)
        elif "lm_head.weight" in self._tensors:
            self._file_dtypes["lm_head.weight"] = self._tensors.pop("lm_head.weight").dtype
            self._named["lm_head.weight"] = embedding
        rest = [name for name in self._tensors if not name.endswith("rotary_emb.inv_freq")]
        if rest:
            raise ConfigError(f"{self._path} holds {len(rest)} tensors {spec.architecture} does not have: {rest[:3]}")
        return ServedWeights(
            embedding=embedding,
            layers=layers,
            final_norm=final_norm,
            head=head,
            named=self._named,
            file_dtypes=self._file_dtypes,
        )

    def _layer(self, prefix: str) -> LayerWeights:
        spec = self._spec
        hidden, inner = spec.hidden_size, spec.intermediate_size
        queries, keys = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        attention, mlp = prefix + "self_attn.", prefix + "mlp."
        qkv = {f"{attention}q_proj": queries, f"{attention}k_proj": keys, f"{attention}v_proj": keys}
        gate_up = {f"{mlp}gate_proj": inner, f"{mlp}up_proj": inner}
        norms = {f"{attention}q_norm.weight": spec.num_heads, f"{attention}k_norm.weight": spec.num_kv_heads}
        return LayerWeights(
            input_norm=self._take(prefix + "input_layernorm.weight", (hidden,)),
            qkv=self._fuse({f"{name}.weight": (rows, hidden) for name, rows in qkv.items()}),
            qkv_bias=self._fuse({f"{name}.bias": (rows,) for name, rows in qkv.items()}) if spec.qkv_bias else None,
            qk_norm=self._head_norms(norms) if spec.qk_norm else None,
            out=self._take(f"{attention}o_proj.weight", (hidden, queries)),
            out_bias=self._take(f"{attention}o_proj.bias", (hidden,)) if spec.out_bias else None,
            post_norm=self._take(prefix + "post_attention_layernorm.weight", (hidden,)),
            gate_up=self._fuse({f"{name}.weight": (rows, hidden) for name, rows in gate_up.items()}),
            gate_up_bias=self._fuse({f"{name}.bias": (rows,) for name, rows in gate_up.items()}) if spec.mlp_bias else None,
            down=self._take(f"{mlp}down_proj.weight", (hidden, inner)),
            down_bias=self._take(f"{mlp}down_proj.bias", (hidden,)) if spec.mlp_bias else None,
        )

    def _checked(self, name: str, shape: tuple[int, ...]) -> Tensor:
        tensor = self._tensors.pop(name, None)
        if tensor is None:
            raise ConfigError(f"{self._path} has no tensor {name}, which {self._spec.architecture} needs")
        if tuple(tensor.shape) != shape:
            raise ConfigError(f"{self._path}: {name} must have shape {list(shape)}, got {list(tensor.shape)}")
        if tensor.dtype not in SAFETENSORS_NAMES:
            raise ConfigError(f"{self._path}: {name} has dtype {tensor.dtype}; expected a floating-point type")
        if not bool(torch.isfinite(tensor).all()):
            raise ConfigError(f"{self._path}: {name} holds values that are not finite; the weights are unusable")
        self._file_dtypes[name] = tensor.dtype
        return tensor

    def _take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        tensor = self._checked(name, shape).to(self._device, self._dtype, copy=True)
        self._named[name] = tensor
        return tensor

    def _fuse(self, shapes: Mapping[str, tuple[int, ...]]) -> Tensor:
        parts = [self._checked(name, shape).to(self._device, self._dtype) for name, shape in shapes.items()]
        fused = torch.cat(parts)
        for name, view in zip(shapes, fused.split([len(part) for part in parts]), strict=True):
            self._named[name] = view
        return fused

    def _head_norms(self, repeats: Mapping[str, int]) -> Tensor:
        """Repeat each [head_dim] norm over its heads, so that one multiplication serves queries and keys."""
        rows: list[Tensor] = []
        for name, count in repeats.items():
            weight = self._checked(name, (self._spec.head_dim,)).to(self._device, self._dtype)
            rows.append(weight.expand(count, -1))
        fused = torch.cat(rows)
        starts = torch.tensor([0, *repeats.values()]).cumsum(0).tolist()
        for name, start in zip(repeats, starts, strict=False):
            self._named[name] = fused[start]
        return fused
