"""The global norm of gradients, whole or split over ranks, and their clipping.

Invariant: each element of each gradient counts once, whichever ranks hold it.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor


def clip_gradients(parameters: Iterable[Tensor], max_norm: float) -> float:
    """Scale the gradients down to the global L2 norm `max_norm`, and return the norm before.

    The rule is that of `torch.nn.utils.clip_grad_norm_`, which fails on meshes that differ between parameters.
    """
    with_gradient = [parameter for parameter in parameters if parameter.grad is not None]
    gradients = [parameter.grad for parameter in with_gradient if parameter.grad is not None]
    if not any(isinstance(gradient, DTensor) for gradient in gradients):
        return float(torch.nn.utils.clip_grad_norm_(with_gradient, max_norm))
    norm = _global_norm(gradients)
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    torch._foreach_mul_([_local(gradient) for gradient in gradients], scale)  # pyright: ignore[reportPrivateUsage] - the one fused call for many tensors
    return float(norm)


def _global_norm(gradients: Iterable[Tensor]) -> Tensor:
    """Return the L2 norm of all gradients: squares of local parts, summed over the mesh dimensions that split them."""
    sums: dict[tuple[str, ...], Tensor] = {}
    groups: dict[tuple[str, ...], list[dist.ProcessGroup]] = {}
    for gradient in gradients:
        split = _split_dimensions(gradient)
        square = _local(gradient).float().square().sum()
        sums[split] = sums[split] + square if split in sums else square
        if isinstance(gradient, DTensor):
            groups[split] = [gradient.device_mesh.get_group(name) for name in split]
    for split in sorted(sums):
        for group in groups.get(split, []):
            dist.all_reduce(sums[split], group=group)
    return torch.stack(list(sums.values())).sum().sqrt()


def _split_dimensions(gradient: Tensor) -> tuple[str, ...]:
    if not isinstance(gradient, DTensor):
        return ()
    names = gradient.device_mesh.mesh_dim_names or ()
    return tuple(name for name, placement in zip(names, gradient.placements, strict=True) if not placement.is_replicate())


def _local(gradient: Tensor) -> Tensor:
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient
