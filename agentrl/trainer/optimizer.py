"""Learning-rate schedules, AdamW parameter groups, the clipping of gradients, and Muon.

Invariant: the learning rate is a pure function of the number of the optimizer step; weight decay touches matrices only.
Each element of each gradient, weight and update counts once in its global norm, whichever ranks hold it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from agentrl.trainer.parallel.shard import local_part

Schedule = Literal["constant", "linear", "cosine"]
_PIECE = 1 << 24
"""Elements of a tensor that `update_to_weight_ratio` computes at a time."""


def schedule_factor(step: int, *, schedule: Schedule, warmup_steps: int, total_steps: int) -> float:
    """Return the learning rate of optimizer step `step` (from 0) as a fraction of its peak.

    Warm-up rises linearly to 1 over `warmup_steps`; `linear` and `cosine` then fall so that step `total_steps` would be 0.

    Example:
        >>> [schedule_factor(s, schedule="linear", warmup_steps=2, total_steps=6) for s in range(6)]
        [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    if schedule == "constant":
        return 1.0
    progress = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
    return 1.0 - progress if schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))


def adamw(
    parameters: Iterable[nn.Parameter], *, lr: float, betas: tuple[float, float], weight_decay: float
) -> torch.optim.AdamW:
    """Return AdamW over `parameters`, decaying matrices (two or more dimensions) only."""
    every = list(parameters)
    groups = [
        {"params": [p for p in every if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in every if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=lr, betas=betas, fused=True)


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of every parameter group."""
    for group in optimizer.param_groups:
        group["lr"] = lr


def clip_gradients(parameters: Iterable[Tensor], max_norm: float) -> float:
    """Scale the gradients down to the global L2 norm `max_norm`, and return the norm before.

    `torch.nn.utils.clip_grad_norm_` fails on meshes that differ between parameters, and is off by up to 1e-4 on a CPU.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    parts = [local_part(gradient) if isinstance(gradient, DTensor) else gradient for gradient in gradients]
    norm = _global_norm(gradients, [part.float().square().sum() for part in parts])
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    torch._foreach_mul_(parts, scale)  # pyright: ignore[reportPrivateUsage] - the one fused call for many tensors
    return float(norm)


@torch.no_grad()
def update_to_weight_ratio(optimizer: torch.optim.AdamW) -> float:
    """Return the L2 norm of the last change, divided by the L2 norm of the weights; 0 before the first step.

    The change is computed again from the moments. A weight without a gradient in the last step counts with the change
    before.
    """
    weights: list[Tensor] = []
    changes: list[Tensor] = []
    sizes: list[Tensor] = []
    for group in optimizer.param_groups:
        for weight in group["params"]:
            state = optimizer.state.get(weight, {})
            pieces = _local_pieces(weight)
            weights.append(weight)
            sizes.append(torch.stack([piece.float().square().sum() for piece in pieces]).sum())
            changes.append(_squared_change(pieces, state, group) if state else torch.zeros_like(sizes[-1]))
    size = float(_global_norm(weights, sizes))
    return float(_global_norm(weights, changes)) / size if size else 0.0


def _squared_change(pieces: Sequence[Tensor], state: Mapping[str, Tensor], group: Mapping[str, Any]) -> Tensor:
    first, second = group["betas"]
    mean, square = (_local_pieces(state[name]) for name in ("exp_avg", "exp_avg_sq"))
    step, lr, decay = state["step"], group["lr"], group["lr"] * group["weight_decay"]
    total: list[Tensor] = []
    for weight, m, v in zip(pieces, mean, square, strict=True):
        move = lr / (1 - first**step) * m / ((v / (1 - second**step)).sqrt() + group["eps"])
        total.append(((move + decay * weight) / (1 - decay)).float().square().sum())
    return torch.stack(total).sum()


def _local_pieces(tensor: Tensor) -> Sequence[Tensor]:
    part = local_part(tensor) if isinstance(tensor, DTensor) else tensor
    return part.reshape(-1).split(_PIECE)


def _global_norm(tensors: Iterable[Tensor], squares: Iterable[Tensor]) -> Tensor:
    """Return the L2 norm of all tensors: `squares` of their local parts, summed over the mesh dimensions that split them."""
    sums: dict[tuple[str, ...], Tensor] = {}
    groups: dict[tuple[str, ...], list[dist.ProcessGroup]] = {}
    for tensor, square in zip(tensors, squares, strict=True):
        split = _split_dimensions(tensor)
        sums[split] = sums[split] + square if split in sums else square
        if isinstance(tensor, DTensor):
            groups[split] = [tensor.device_mesh.get_group(name) for name in split]
    for split in sorted(sums):
        for group in groups.get(split, []):
            dist.all_reduce(sums[split], group=group)
    return torch.stack(list(sums.values())).sum().sqrt()


def _split_dimensions(tensor: Tensor) -> tuple[str, ...]:
    if not isinstance(tensor, DTensor):
        return ()
    names = tensor.device_mesh.mesh_dim_names or ()
    return tuple(name for name, placement in zip(names, tensor.placements, strict=True) if not placement.is_replicate())


class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalized: each matrix moves by the nearest semi-orthogonal matrix to its Nesterov momentum.

    Source: Jordan et al. 2024, "Muon: an optimizer for hidden layers in neural networks" (the quintic Newton-Schulz
    iteration and its coefficients, and the sqrt(max(1, rows / columns)) scale). Matrices of one shape, transposed where
    they are tall, are orthogonalized as one batch in float32, which is faster for small ones than `torch.optim.Muon`.
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], *, lr: float, momentum: float = 0.95, iterations: int = 5
    ) -> None:
        """Optimize the two-dimensional tensors `parameters`; a step changes a matrix by about the spectral norm `lr`."""
        matrices = list(parameters)
        if any(matrix.ndim != 2 for matrix in matrices):
            raise ValueError(f"Muon optimizes matrices only, got shapes {sorted({tuple(m.shape) for m in matrices})}")
        super().__init__(matrices, {"lr": lr})
        self._momentum = momentum
        self._iterations = iterations
        self._batches = [_Batch(batch) for batch in _by_shape(matrices)]

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride] - no closure, no loss
        """Update every matrix that has a gradient; either all matrices of one shape have one or none has."""
        if closure is not None:
            raise ValueError("Muon takes no closure")
        lr = float(self.param_groups[0]["lr"])
        for batch in self._batches:
            batch.step(lr, self._momentum, self._iterations)


class _Batch:
    """Matrices of one shape up to transposition, with their stacked momentum; wide side last."""

    def __init__(self, matrices: Sequence[nn.Parameter]) -> None:
        self._matrices = matrices
        self._tall = [matrix.shape[0] > matrix.shape[1] for matrix in matrices]
        self._scales = [math.sqrt(max(1.0, matrix.shape[0] / matrix.shape[1])) for matrix in matrices]
        first = matrices[0]
        rows, columns = sorted(first.shape)
        self._sum = torch.zeros(len(matrices), rows, columns, dtype=torch.float32, device=first.device)

    def step(self, lr: float, momentum: float, iterations: int) -> None:
        gradients = [matrix.grad for matrix in self._matrices]
        present = [gradient for gradient in gradients if gradient is not None]
        if len(present) < len(self._matrices):
            if present:
                raise ValueError("Muon: some matrices of one shape have a gradient and some have none")
            return
        gradient = torch.stack([g.T if tall else g for g, tall in zip(present, self._tall, strict=True)]).float()
        self._sum.lerp_(gradient, 1 - momentum)
        updates = orthogonalize(gradient.lerp(self._sum, momentum), iterations)
        moved = zip(self._matrices, updates, self._tall, self._scales, strict=True)
        for matrix, update, tall, scale in moved:
            matrix.add_((update.T if tall else update).to(matrix.dtype), alpha=-lr * scale)


def orthogonalize(matrices: Tensor, iterations: int = 5) -> Tensor:
    """Return [k, m, n] matrices, m <= n, with all singular values moved near 1 (roughly 0.7 to 1.2) by Newton-Schulz.

    Source: Jordan et al. 2024; the quintic iteration X <- aX + (bA + cA^2)X with A = XX^T.
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    x = matrices / (matrices.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(iterations):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x


def _by_shape(matrices: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
    batches: Mapping[tuple[int, ...], list[nn.Parameter]] = {}
    for matrix in matrices:
        batches.setdefault(tuple(sorted(matrix.shape)), []).append(matrix)
    return list(batches.values())
