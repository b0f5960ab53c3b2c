"""Copy the parts of a rank to host memory for a checkpoint, and load its parts from one.

Invariant: each element is in the copies of exactly one rank, as the bytes that training uses, so a restored trainer
continues bit for bit. No rank holds the whole model: weights are gathered one tensor at a time, and optimizer state not at
all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from agentrl.trainer.model import PolicyModel
from agentrl.trainer.parallel.ranks import Ranks
from agentrl.trainer.parallel.shard import held_box, whole
from agentrl.trainer.tensors import raw_tensor, torch_tensor
from agentrl.weights.parts import Index, StoredTensor, TensorPart


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedParts:
    """The parts that one rank writes, in host memory."""

    weights: Mapping[str, TensorPart]
    """Whole tensors, by HF parameter name."""
    optimizer: Mapping[str, TensorPart]
    """By name; random states are among them."""


def stage_weights(model: PolicyModel) -> dict[str, TensorPart]:
    """Return copies of the weights that this rank writes, under HF names; every rank must call it."""
    ranks, parameters = model.ranks, model.parameters
    sizes = [HeldPart(name, (0,) * p.ndim, p.numel() * p.element_size()) for name, p in parameters.items()]
    mine = names_to_write([sizes] * ranks.world, ranks.rank)
    owned: dict[str, Tensor] = {}
    for name, parameter in parameters.items():
        gathered = whole(parameter.detach())  # a collective: every rank takes part
        if name in mine:
            owned[name] = _host_copy(gathered)
    if ranks.rank == 0:
        owned |= {name: _host_copy(buffer) for name, buffer in model.saved_buffers().items()}
    named = {name: raw_tensor(tensor) for name, tensor in model.with_checkpoint_names(owned).items()}
    return {name: TensorPart(whole=raw.shape, offset=(0,) * len(raw.shape), data=raw) for name, raw in named.items()}


def stage_parts(tensors: Mapping[str, Tensor], ranks: Ranks) -> dict[str, TensorPart]:
    """Return copies of the parts of `tensors` that this rank writes; every rank must call it.

    Each tensor is split, or held whole by every rank that has it. Of ranks that hold the same part, one writes it.
    """
    parts = {name: held_box(tensor) for name, tensor in tensors.items()}
    held = [HeldPart(name, offset, part.numel() * part.element_size()) for name, (offset, part) in parts.items()]
    filled = [part for part in held if part.num_bytes]
    every = [msgspec.json.decode(data, type=list[HeldPart]) for data in ranks.gather(msgspec.json.encode(filled))]
    return {
        name: TensorPart(
            whole=tuple(tensors[name].shape), offset=parts[name].offset, data=raw_tensor(_host_copy(parts[name].elements))
        )
        for name in sorted(names_to_write(every, ranks.rank))
    }


def take_state(parameter: Tensor, stored: StoredTensor) -> Tensor:
    """Return optimizer state `stored` of `parameter`: split like the parameter, or whole if it is a number."""
    if not stored.shape or stored.shape != tuple(parameter.shape):
        return torch_tensor(stored.whole()).to(parameter.device)
    offset, elements = held_box(parameter.detach())
    values = torch_tensor(stored.box(offset, tuple(elements.shape))).to(parameter.device)
    if not isinstance(parameter, DTensor):
        return values
    state = torch.zeros_like(parameter, dtype=values.dtype, requires_grad=False)
    held_box(state).elements.copy_(values)
    return state


def _host_copy(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True).contiguous()


class HeldPart(msgspec.Struct, frozen=True, array_like=True):
    """A part of the tensor `name` that a rank could write."""

    name: str
    offset: Index
    num_bytes: int


def names_to_write(held: Sequence[Sequence[HeldPart]], rank: int) -> frozenset[str]:
    """Return the names of the tensors whose part `rank` writes, from the parts that each rank holds.

    Of the ranks that hold the same part, the one with the least to write so far is chosen, the largest parts first; so all
    ranks agree.
    """
    holders: dict[HeldPart, list[int]] = {}
    for number, parts in enumerate(held):
        for part in parts:
            holders.setdefault(part, []).append(number)
    load = [0] * len(held)
    chosen: set[str] = set()
    for part in sorted(holders, key=lambda part: (-part.num_bytes, part.name, part.offset)):
        writer = min(holders[part], key=lambda number: (load[number], number))
        load[writer] += part.num_bytes
        if writer == rank:
            chosen.add(part.name)
    return frozenset(chosen)
