"""Generalized advantage estimation over packed tokens, without a loop over time.

Invariant: no value crosses a sequence boundary; the result equals the sequential recurrence up to rounding in float64.

Source: Schulman et al., arXiv 1506.02438, equation 16: A_t = delta_t + c * A_(t+1) with c = discount * lam. Inside a block
the scan is a product with the triangular matrix of powers of c; the values that pass from block to block obey the same
recurrence with c ** block (block-wise prefix sums: Blelloch 1990). Powers of c are factors, never divisors: nothing
overflows.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

MAX_BLOCK = 64
"""Larger blocks multiply more zeros, which costs more than the passes they save."""


class Gae(NamedTuple):
    """The result of `gae`, in the dtype and on the device of the values."""

    advantages: Tensor
    """[T]."""
    returns: Tensor
    """[T]: advantages + values, the critic's regression target."""


def gae(rewards: Tensor, values: Tensor, boundaries: Tensor, discount: float, lam: float) -> Gae:
    """Return the estimates of [T] float `rewards` and `values` of sequences laid end to end.

    delta_t = rewards_t + discount * values_(t+1) - values_t, with value 0 after the last token of a sequence. Sequence s
    is tokens boundaries[s] to boundaries[s + 1] of [S + 1] int `boundaries`. To skip tokens that the policy did not
    choose, leave them out. No gradient flows.

    Example:
        >>> result = gae(torch.tensor([0.0, 1.0, 5.0]), torch.zeros(3), torch.tensor([0, 2, 3]), 0.5, 1.0)
        >>> result.advantages.tolist()
        [0.5, 1.0, 5.0]
    """
    if rewards.dim() != 1 or rewards.shape != values.shape:
        raise ValueError(f"expected rewards and values of one shape [T], got {[*rewards.shape]} and {[*values.shape]}")
    if not (0 <= discount <= 1 and 0 <= lam <= 1):
        raise ValueError(f"expected discount and lam in [0, 1], got {discount} and {lam}")
    edges = boundaries.to(device="cpu", dtype=torch.int64)
    lengths = edges.diff()
    if edges.dim() != 1 or len(edges) < 1 or edges[0] != 0 or edges[-1] != len(values) or bool((lengths < 0).any()):
        raise ValueError(f"expected boundaries ascending from 0 to {len(values)}, got {edges.tolist()[:8]}...")
    exact = values.detach().double()
    following = torch.zeros_like(exact)
    following[:-1] = exact[1:]
    lengths = lengths[lengths > 0]
    following[(lengths.cumsum(0) - 1).to(values.device)] = 0.0
    deltas = rewards.detach().double() + discount * following - exact
    scanned = _scan(deltas, lengths, discount * lam) if len(deltas) else deltas
    return Gae(advantages=scanned.to(values.dtype), returns=(scanned + exact).to(values.dtype))


def _scan(deltas: Tensor, lengths: Tensor, decay: float) -> Tensor:
    block = _block_size(len(deltas) / len(lengths))
    blocks = (lengths + block - 1) // block
    total = int(blocks.sum())
    # Token t of sequence s moves to t + shift_s, which starts every sequence at a new block; the rest stays 0.
    shift = (blocks.cumsum(0) - blocks) * block - (lengths.cumsum(0) - lengths)
    moved = torch.arange(len(deltas)) + torch.repeat_interleave(shift, lengths)
    moved = moved.to(deltas.device)
    padded = deltas.new_zeros(total * block)
    padded[moved] = deltas
    steps = torch.arange(block, device=deltas.device)
    distance = steps[:, None] - steps[None, :]
    powers = torch.where(distance >= 0, decay ** distance.clamp(min=0).double(), 0.0)
    local = padded.view(total, block) @ powers
    if total > len(lengths):
        firsts = _scan(local[:, 0].contiguous(), blocks, decay**block)
        carried = torch.zeros_like(firsts)
        carried[:-1] = firsts[1:]
        carried[(blocks.cumsum(0) - 1).to(deltas.device)] = 0.0
        local = torch.addr(local, carried, decay ** (block - steps).double())
    return local.view(-1)[moved]


def _block_size(mean_length: float) -> int:
    block = 4
    while block < MAX_BLOCK and block < mean_length:
        block *= 2
    return block
