"""Small tensor functions of losses and corrections. A share is the tokens of one sample, or of a microbatch.

Invariant: no value crosses from one share to another.
"""

from __future__ import annotations

import torch
from torch import Tensor


def ascending_in_shares(values: Tensor, share: Tensor) -> Tensor:
    """Return the order, [T] int, that sorts by share, and within a share by value."""
    by_value = torch.argsort(values, stable=True)
    return by_value[torch.argsort(share[by_value], stable=True)]


def running_sum(values: Tensor, sorted_share: Tensor) -> Tensor:
    """Return the sums of `values`, [T], from the first token of each share to each token, itself included."""
    running = values.cumsum(0)
    starts = torch.searchsorted(sorted_share, sorted_share)
    return running - running[starts] + values[starts]


def chosen(where: Tensor, one: float, other: float, like: Tensor) -> Tensor:
    """Return `one` where `where` is True, else `other`, in the dtype of `like`, which two bare numbers would lose."""
    return torch.where(where, like.new_tensor(one), like.new_tensor(other))
