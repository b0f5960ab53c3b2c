"""Matrices split over ranks that compute one forward pass together (tensor parallelism).

Attention is split by heads, the feed-forward by features, embeddings and output head by tokens of the vocabulary. Each
block adds up its ranks' parts twice in the forward pass and twice in the backward pass.

Invariant: what is not split is bitwise the same on all ranks, before and after every optimizer step: they compute the same
hidden states, and `sum_partial_gradients` completes the gradients that depend on a rank's heads. No rank ever holds a whole
row of logits: ranks exchange [n] and [2, n] numbers to make the log-probs of n tokens, and none to make their gradient.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)

from agentrl.trainer.parallel.shard import local_part

_HEAD_NORMS: Final = ("q_norm", "k_norm")


def split_block(block: nn.Module, mesh: DeviceMesh) -> None:
    """Replace the matrices of a layer, named as in Llama, by this rank's parts, which have no memory yet."""
    parallelize_module(block, mesh, _block_styles(), src_data_rank=None)


def split_vocabulary(embeddings: nn.Module, head: nn.Module, mesh: DeviceMesh) -> None:
    """Replace the rows of both matrices by those of this rank's tokens; `head` then returns the logits of these tokens."""
    is_tied = embeddings.get_parameter("weight") is head.get_parameter("weight")
    rows = RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate())
    parallelize_module(embeddings, mesh, rows, src_data_rank=None)
    parallelize_module(head, mesh, ColwiseParallel(), src_data_rank=None)
    if is_tied:
        head.register_parameter("weight", embeddings.get_parameter("weight"))


def _block_styles() -> dict[str, ParallelStyle]:
    # The input becomes a DTensor once for all matrices that read it, so that their gradients are added up once.
    whole = Replicate()
    return {
        "self_attn": PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": whole}, desired_input_kwarg_layouts={"hidden_states": whole}
        ),
        "self_attn.q_proj": ColwiseParallel(),
        "self_attn.k_proj": ColwiseParallel(),
        "self_attn.v_proj": ColwiseParallel(),
        "self_attn.o_proj": RowwiseParallel(),
        "mlp": PrepareModuleInput(input_layouts=(whole,), desired_input_layouts=(whole,)),
        "mlp.gate_proj": ColwiseParallel(),
        "mlp.up_proj": ColwiseParallel(),
        "mlp.down_proj": RowwiseParallel(),
    }


def sum_partial_gradients(parameters: Mapping[str, nn.Parameter], group: dist.ProcessGroup) -> None:
    """Complete the gradients of the norms of queries and keys: each rank of `group` has those of its own heads only.

    Call it once per optimizer step, after the last backward pass: a second call would count the heads again.
    """
    gradients = [
        local_part(parameter.grad)
        for name, parameter in parameters.items()
        if name.split(".")[-2] in _HEAD_NORMS and parameter.grad is not None
    ]
    if not gradients:
        return
    total = torch.cat([gradient.reshape(-1) for gradient in gradients])
    dist.all_reduce(total, group=group)
    for gradient, part in zip(gradients, total.split([gradient.numel() for gradient in gradients]), strict=True):
        gradient.copy_(part.view_as(gradient))


def replicas_agree(parameters: Mapping[str, nn.Parameter], group: dist.ProcessGroup) -> bool:
    """Return whether the weights that every rank of `group` holds whole have the same bits on all of them."""
    whole = [local_part(parameter.detach()).reshape(-1) for parameter in parameters.values() if not _is_split(parameter)]
    bits = torch.cat(whole).view(torch.int32).long()
    digest = (bits * torch.arange(1, len(bits) + 1, device=bits.device)).sum()
    extremes = torch.stack([digest, -digest])
    dist.all_reduce(extremes, dist.ReduceOp.MAX, group=group)
    return bool(extremes[0] == -extremes[1])


def _is_split(parameter: nn.Parameter) -> bool:
    if not isinstance(parameter, DTensor):
        return False
    names = parameter.device_mesh.mesh_dim_names or ()
    return any(name == "tp" and not at.is_replicate() for name, at in zip(names, parameter.placements, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class VocabularyPart:
    """The tokens whose logits this rank computes."""

    first: int
    group: dist.ProcessGroup
    """The ranks that hold the whole vocabulary, in the order of its parts."""

    def logprobs(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return [n] float32 log-probs, nats, of [n] int64 `targets`; the same on every rank, and differentiable.

        `logits` are [n, this rank's tokens] float32; `targets` are tokens of the whole vocabulary.
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
