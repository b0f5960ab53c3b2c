"""The part of a tensor that this rank holds.

Invariant: it is one box of the tensor, and its elements are those that training uses.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor
from torch.distributed.tensor import DTensor

from agentrl.errors import InvariantError
from agentrl.trainer.parallel.shard import local_part
from agentrl.weights.parts import Index


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
