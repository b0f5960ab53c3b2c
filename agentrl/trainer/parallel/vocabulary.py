"""Log-probs from logits of which each rank holds the columns of its part of the vocabulary.

Invariant: no rank ever holds a whole row of logits. Ranks exchange [n] and [2, n] numbers to make the log-probs of n
tokens, and none to make their gradient.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable


@dataclass(frozen=True, slots=True, kw_only=True)
class VocabularyPart:
    """The tokens whose logits this rank computes."""

    first: int
    group: dist.ProcessGroup
    """The ranks that hold the whole vocabulary together, in the order of its parts."""

    def logprobs(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return [n] float32 log-probs, nats, of `targets`; the same on every rank, and differentiable.

        Args:
            logits: [n, this rank's tokens] float32.
            targets: [n] int64 tokens of the whole vocabulary, the same on every rank.
        """
        return _TokenLogprobs.apply(logits, targets - self.first, self.group)  # pyright: ignore[reportReturnType] - torch leaves it untyped


def vocabulary_part(vocab_size: int, group: dist.ProcessGroup) -> VocabularyPart:
    """Return this rank's part of `vocab_size` tokens, cut as DTensor cuts rows: the last rank may have fewer."""
    return VocabularyPart(first=math.ceil(vocab_size / group.size()) * group.rank(), group=group)


class _Saved(FunctionCtx):
    saved_tensors: tuple[Tensor, Tensor, Tensor]


class _TokenLogprobs(torch.autograd.Function):
    """log softmax(z)_t = z_t - m - log sum_j exp(z_j - m), m = max z; its gradient in z is onehot(t) - softmax(z)."""

    @staticmethod
    def forward(ctx: _Saved, logits: Tensor, columns: Tensor, group: dist.ProcessGroup) -> Tensor:
        is_here = (columns >= 0) & (columns < logits.shape[1])
        column = columns.clamp(0, logits.shape[1] - 1)[:, None]
        largest = logits.amax(1)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
        shifted = logits - largest[:, None]
        target = shifted.gather(1, column)[:, 0].masked_fill(~is_here, 0.0)
        powers = shifted.exp_()
        sums = torch.stack([powers.sum(1), target])
        dist.all_reduce(sums, dist.ReduceOp.SUM, group=group)
        total, target = sums.unbind()
        ctx.save_for_backward(powers.div_(total[:, None]), column, is_here)
        return target - total.log()

    @staticmethod
    @once_differentiable
    def backward(ctx: _Saved, gradient: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride] - torch declares *grad_outputs
        softmax, column, is_here = ctx.saved_tensors
        result = softmax * -gradient[:, None]
        return result.scatter_add_(1, column, (gradient * is_here)[:, None]), None, None
