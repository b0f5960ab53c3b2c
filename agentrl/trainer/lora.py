"""LoRA within a model: linear layers that compute `W x + (alpha / rank) B A x`, of which A and B are trained.

Source: Hu et al. 2021 (arXiv 2106.09685), equation 3.

Invariant: the base keeps its names, and never changes. A and B are float32 and begin the same for every number of ranks.
The merged weight of a layer is computed in float32 and rounded once; where B is 0 it is the base, bit for bit.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.nn import functional

from agentrl.errors import ConfigError, InvariantError
from agentrl.trainer.config import LoraConfig
from agentrl.trainer.parallel.ranks import Ranks
from agentrl.trainer.parallel.shard import held_box, whole
from agentrl.trainer.parallel.snapshot import snapshot, torch_tensor
from agentrl.weights.peft_files import AdapterBase, PeftConfig, adapter_documents, peft_name
from agentrl.weights.tensors import StoredTensor


class AdaptedLinear(nn.Linear):
    """A linear layer with an adapter; `add_adapter` makes one of a layer that is there."""

    lora_A: nn.Parameter
    """[rank, in]."""
    lora_B: nn.Parameter
    """[out, rank]."""
    scale: float

    def forward(self, input: Tensor) -> Tensor:
        base = functional.linear(input, self.weight, self.bias)
        return base + functional.linear(functional.linear(input, self.lora_A), self.lora_B) * self.scale


def freeze(module: nn.Module, dtype: torch.dtype) -> None:
    """Exclude the parameters of `module` from training, and give them `dtype`; tied ones stay tied, without memory yet."""
    made: dict[nn.Parameter, nn.Parameter] = {}
    for owner in module.modules():
        for name, parameter in owner.named_parameters(recurse=False):
            if parameter not in made:
                made[parameter] = nn.Parameter(torch.empty_like(parameter, dtype=dtype), requires_grad=False)
            owner.register_parameter(name, made[parameter])


def choose_trained(
    module: nn.Module,
    lora: LoraConfig | None,
    trainable: str | None,
    mesh: DeviceMesh | None,
    *,
    dtype: Literal["float32", "bfloat16"],
    where: object,
) -> Adapter | None:
    """Mark the tensors of `module` that a run trains, before they have memory; return the adapter, if the run trains one.

    Raises:
        ConfigError: the settings do not fit the model; names `where`.
    """
    if lora is not None:
        freeze(module, getattr(torch, dtype))
        add_adapters(module, lora, mesh, where)
        return Adapter.of(module, lora)
    if trainable is not None:
        _select(module, trainable, where)
    return None


def _select(module: nn.Module, pattern: str, where: object) -> None:
    chosen = {name: re.search(pattern, name) is not None for name, _ in module.named_parameters()}
    if not any(chosen.values()):
        examples = ", ".join(list(chosen)[:3])
        raise ConfigError(f"trainer.trainable: {pattern!r} matches no weight of {where}; it has such as {examples}")
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(chosen[name])


def add_adapters(module: nn.Module, config: LoraConfig, mesh: DeviceMesh | None, where: object) -> None:
    """Give the linear layers of `module` that `config` names an adapter without memory; `mesh` splits them for tp already.

    Raises:
        ConfigError: a target names no linear layer, or the rank is above the size of one; names `where`.
    """
    linear = {name: layer for name, layer in module.named_modules() if isinstance(layer, nn.Linear)}
    for target in config.targets:
        chosen = {name: layer for name, layer in linear.items() if name.rpartition(".")[2] == target}
        if not chosen:
            known = sorted({name.rpartition(".")[2] for name in linear})
            raise ConfigError(f"trainer.lora.targets: {where} has no linear layer {target}; it has {', '.join(known)}")
        for name, layer in chosen.items():
            if config.rank > min(layer.weight.shape):
                raise ConfigError(
                    f"trainer.lora.rank: {config.rank} is above the size of {name} {list(layer.weight.shape)}, which has no "
                    f"larger update; at most {min(layer.weight.shape)}"
                )
            _add_adapter(layer, config, mesh)


def _add_adapter(layer: nn.Linear, config: LoraConfig, mesh: DeviceMesh | None) -> None:
    outputs, inputs = layer.weight.shape
    layer.__class__ = AdaptedLinear  # in place: its name, its hooks and its split weight stay as they are
    adapted = cast("AdaptedLinear", layer)
    adapted.scale = config.alpha / config.rank
    first: Tensor = torch.empty(config.rank, inputs, device="meta")
    second: Tensor = torch.empty(outputs, config.rank, device="meta")
    if mesh is not None and isinstance(layer.weight, DTensor):
        by_rows = layer.weight.placements == (Shard(0),)
        split: tuple[Placement, Placement] = (Replicate(), Shard(0)) if by_rows else (Shard(1), Replicate())
        first = distribute_tensor(first, mesh, [split[0]], src_data_rank=None)
        second = distribute_tensor(second, mesh, [split[1]], src_data_rank=None)
    adapted.register_parameter("lora_A", nn.Parameter(first))
    adapted.register_parameter("lora_B", nn.Parameter(second))


@dataclass(frozen=True, slots=True)
class Adapter:
    """The adapter of a model."""

    config: LoraConfig
    layers: Mapping[str, AdaptedLinear]
    """By name of the module, such as `model.layers.0.mlp.up_proj`."""

    @classmethod
    def of(cls, module: nn.Module, config: LoraConfig) -> Adapter:
        named = module.named_modules()
        return cls(config, {name: layer for name, layer in named if isinstance(layer, AdaptedLinear)})

    def matrices(self) -> dict[str, tuple[str, nn.Parameter]]:
        """Return PEFT's name and the parameter by the name in the module."""
        found: dict[str, tuple[str, nn.Parameter]] = {}
        for name, layer in self.layers.items():
            found[f"{name}.lora_A"] = peft_name(name, "A"), layer.lora_A
            found[f"{name}.lora_B"] = peft_name(name, "B"), layer.lora_B
        return found

    def begin(self, seed: int) -> None:
        """Draw A from `seed`, uniform within 1 / sqrt(in) as `nn.Linear` does, and set B to 0; each rank fills its part."""
        with torch.no_grad():
            for name, layer in self.layers.items():
                own = int.from_bytes(hashlib.blake2b(f"{seed} {name}".encode(), digest_size=7).digest(), "little")
                bound = 1 / math.sqrt(layer.lora_A.shape[1])
                drawn = torch.empty(layer.lora_A.shape).uniform_(-bound, bound, generator=torch.Generator().manual_seed(own))
                _fill_part(layer.lora_A, drawn)
                held_box(layer.lora_B).elements.zero_()

    def read(self, stored: Mapping[str, StoredTensor], alpha: float, where: object) -> None:
        """Load A and B from `stored`, by PEFT's names, trained with `alpha`; a ConfigError changes nothing."""
        wanted = dict(self.matrices().values())
        different = sorted(wanted.keys() ^ stored.keys()) or sorted(
            name for name, parameter in wanted.items() if stored[name].shape != tuple(parameter.shape)
        )
        if different or alpha != self.config.alpha:
            difference = f"{different[:3]}" if different else f"it was trained with alpha {alpha:g}"
            raise ConfigError(
                f"{where}: the adapter does not fit trainer.lora (rank {self.config.rank}, targets "
                f"{', '.join(self.config.targets)}, alpha {self.config.alpha:g}): {difference}; continue with the settings "
                "that it was trained with"
            )
        with torch.no_grad():
            for name, parameter in wanted.items():
                offset, elements = held_box(parameter)
                elements.copy_(torch_tensor(stored[name].box(offset, tuple(elements.shape))))

    def peft_config(self, base: str) -> PeftConfig:
        return PeftConfig(
            base_model_name_or_path=base,
            r=self.config.rank,
            lora_alpha=self.config.alpha,
            target_modules=tuple(self.config.targets),
        )

    def documents(self, base: AdapterBase) -> dict[str, bytes]:
        """Return the files that describe the adapter, by name."""
        return adapter_documents(self.peft_config(base.path), base)

    def copies(self, ranks: Ranks) -> dict[str, Tensor]:
        """Return copies of A and B on rank 0, by PEFT's names; nothing on others, and every rank must call it."""
        return snapshot({name: parameter.detach() for name, parameter in self.matrices().values()}, ranks)

    def merging(self) -> Merging:
        """Return what merges the weights of now; every rank must call it."""
        return Merging(
            {f"{name}.weight": layer for name, layer in self.layers.items()},
            {f"{name}.weight": whole(layer.lora_A.detach()) for name, layer in self.layers.items()},
        )


def _fill_part(parameter: nn.Parameter, values: Tensor) -> None:
    offset, elements = held_box(parameter)
    ends = zip(offset, elements.shape, strict=True)
    elements.copy_(values[tuple(slice(begin, begin + size) for begin, size in ends)])


@dataclass(frozen=True, slots=True)
class Merging:
    """The sums of base and adapter, layer by layer."""

    layers: Mapping[str, AdaptedLinear]
    """By name of the weight."""
    inner: Mapping[str, Tensor]
    """A of each layer, whole."""

    @torch.no_grad()
    def __call__(self, name: str, tensor: Tensor) -> Tensor:
        """Return this rank's elements of the weight `tensor`, [out, in] float32 with its adapter; others as they are."""
        offset, elements = held_box(tensor.detach())
        layer = self.layers.get(name)
        if layer is None or not elements.numel():
            return elements
        (row, column), (rows, columns) = offset, elements.shape
        at, outer = held_box(layer.lora_B.detach())
        if (at[0], outer.shape[0]) != (row, rows):
            raise InvariantError(
                f"{name}: this rank holds rows {row} to {row + rows} of the base, and of its adapter {at[0]} to "
                f"{at[0] + outer.shape[0]}; use another trainer.parallel"
            )
        inner = self.inner[name][:, column : column + columns]
        return torch.addmm(elements.float(), outer, inner, alpha=layer.scale)
