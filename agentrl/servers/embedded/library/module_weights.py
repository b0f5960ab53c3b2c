"""The weights of one policy version inside a module of transformers, addressed by the names of their checkpoint.

Invariant: a digest is that of the memory that the module computes with, in the form of the checkpoint: where transformers
makes a tensor of others, it is turned back. A `LibraryWeights` never changes after it is made.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import WeightTransform, revert_weight_conversion

from agentrl.errors import ConfigError
from agentrl.servers.embedded.weights import SAFETENSORS_NAMES, held_checksum
from agentrl.weights.heads import logits_of
from agentrl.weights.modules import ReadingPlan, materialize, plan_reading, tied_names, untie_different
from agentrl.weights.tensors import StoredTensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LibraryWeights:
    """A module with the weights of one policy version, on one device, in one dtype."""

    module: PreTrainedModel
    logits: Callable[[Tensor], Tensor]
    """Makes [n, V] logits of [n, hidden] states, with what the module does after its output head."""
    same: Mapping[str, str]
    """Name in the module by name in the checkpoint, of tensors that are the same in both."""
    file_dtypes: Mapping[str, torch.dtype]
    """Of every tensor of the checkpoint, by its name there."""

    @property
    def named(self) -> dict[str, Tensor]:
        """The tensors of the checkpoint by its names: views of memory, but for those that transformers turns back."""
        state: dict[str, Tensor] = self.module.state_dict()
        found = {name: state[inside] for name, inside in self.same.items()}
        if len(found) < len(self.file_dtypes):
            turned: dict[str, Tensor] = revert_weight_conversion(self.module, state)
            found |= {name: turned[name] for name in self.file_dtypes if name not in found}
        return found

    def checksums(self) -> dict[str, str]:
        """Return `held_checksum` of each served tensor, by its name in the checkpoint."""
        return {name: held_checksum(name, tensor, self.file_dtypes[name]) for name, tensor in self.named.items()}

    def others(self, taken: Collection[str]) -> dict[str, Tensor]:
        """Return the tensors that an update of `taken` leaves as they are, in the types of their file."""
        tied = [{name for name, inside in self.same.items() if inside in group} for group in tied_names(self.module)]
        gone = set(taken).union(*(group for group in tied if not group.isdisjoint(taken)))
        return {name: tensor.to(self.file_dtypes[name]) for name, tensor in self.named.items() if name not in gone}


def fill(
    empty: PreTrainedModel,
    conversions: Sequence[WeightTransform],
    tensors: dict[str, Tensor],
    *,
    origin: str,
    device: torch.device,
) -> LibraryWeights:
    """Return weights of `tensors`, by their names in a checkpoint, in a copy of `empty`; they are taken out of the dict.

    Raises:
        ConfigError: they are those of another model, or hold values that are not finite; names `origin`.
    """
    module = deepcopy(empty)
    untie_different(module, tensors, lambda first, other: not torch.equal(tensors[first], tensors[other]))
    types = {name: tensor.dtype for name, tensor in tensors.items()}
    stored = {name: _header(name, tensor, origin) for name, tensor in tensors.items()}
    plan = plan_reading(module, conversions, stored, origin)
    materialize(module, device)
    _copy_into(module, plan, tensors, origin)
    module.eval().requires_grad_(requires_grad=False)
    converted = {name for each in plan.converted for _, name in each.sources}
    return LibraryWeights(
        module=module,
        logits=logits_of(module),
        same={name: inside for inside, name in plan.same.items()},
        file_dtypes={name: dtype for name, dtype in types.items() if name in converted or name in plan.same.values()},
    )


def _header(name: str, tensor: Tensor, origin: str) -> StoredTensor:
    if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
        raise ConfigError(f"{origin}: {name} holds values that are not finite; the weights are unusable")
    return StoredTensor(dtype=SAFETENSORS_NAMES.get(tensor.dtype, str(tensor.dtype)), shape=tuple(tensor.shape), parts=())


def _copy_into(module: PreTrainedModel, plan: ReadingPlan, tensors: dict[str, Tensor], origin: str) -> None:
    state: dict[str, Tensor] = module.state_dict(keep_vars=True)
    with torch.no_grad():
        for inside, name in plan.same.items():
            state[inside].copy_(tensors.pop(name))
        for conversion in plan.converted:
            sources = {name: tensors.pop(name).float() for _, name in conversion.sources}
            for inside, value in conversion.made(module, sources).items():
                state[inside].copy_(value)
    tensors.clear()
