"""Weights split over ranks by FSDP2, and the whole tensors that leave them.

Invariant: between requests each rank holds 1/(dp x cp) of every weight, gradient and optimizer state, in float32, as one box
of the tensor; of matrices that tensor parallelism splits first, 1/(dp x cp x tp). A block is whole while it computes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Replicate

from agentrl.errors import InvariantError
from agentrl.weights.tensors import Index

Method = TypeVar("Method", bound=Callable[..., Tensor])


def shard(module: nn.Module, blocks: nn.ModuleList, mesh: DeviceMesh, *, bfloat16: bool) -> None:
    """Split `module` over `mesh`, each of `blocks` gathered by itself; parts have no memory yet.

    With `bfloat16` the gathered copies have that type, while weights, gradients and their reduction stay float32: the
    forward pass is exactly that of a bfloat16 model.
    """
    policy = MixedPrecisionPolicy()
    if bfloat16:  # inputs stay as they are: they include the temperatures, which are float32
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    for block in blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(module, mesh=mesh, mp_policy=policy)


def as_forward(module: nn.Module, name: str, method: Method) -> Method:
    """Return `method` as a method of the sharded `module`, which gathers its weights around each call."""
    setattr(module, name, method)
    register_fsdp_forward_method(module, name)
    return cast("Method", getattr(module, name))


def whole(tensor: Tensor) -> Tensor:
    """Return a sharded tensor whole, by a collective; return any other tensor as it is."""
    if not isinstance(tensor, DTensor):
        return tensor
    placements = list(tensor.placements)
    for dimension in range(len(placements)):  # one at a time: torch warns about two gathers in one call
        placements[dimension] = Replicate()
        tensor = tensor.redistribute(placements=placements)
    return tensor.full_tensor()


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's elements of `tensor`: its part, or the whole where it is not split; changes go through."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class HeldBox(NamedTuple):
    """The part of a tensor that this rank holds."""

    offset: Index
    elements: Tensor
    """They share memory with the tensor."""


def held_box(tensor: Tensor) -> HeldBox:
    """Return the part of `tensor` that this rank holds; one that is not split is held whole.

    Raises:
        InvariantError: the elements are not one box of the tensor.
    """
    if not isinstance(tensor, DTensor):
        return HeldBox((0,) * tensor.ndim, tensor)
    [chunk] = tensor.__create_chunk_list__()
    elements = local_part(tensor)
    if tuple(chunk.sizes) != tuple(elements.shape):
        raise InvariantError(
            f"this rank holds {tuple(elements.shape)} of a tensor {tuple(tensor.shape)}, but its part should be "
            f"{tuple(chunk.sizes)}: agentrl cannot read or write this split ({tensor.placements}); use another "
            "trainer.parallel"
        )
    return HeldBox(tuple(chunk.offsets), elements)
