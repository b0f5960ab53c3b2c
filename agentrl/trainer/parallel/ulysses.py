"""Context parallelism as in DeepSpeed Ulysses: sequences are cut over ranks, and attention is split by heads.

Source: Jacobs et al. 2023, "DeepSpeed Ulysses: System Optimizations for Enabling Training of Extreme Long Sequence
Transformer Models". Around attention one all-to-all gives each rank whole sequences for some heads, and another gives back
its part of the sequences for all heads. Everything else in a decoder works token by token.

Invariant: log-probs and gradients are those of whole sequences. Each rank of a group returns the log-probs of all wanted
tokens, and differentiates those of its part; the sum of the ranks' gradients is the whole gradient.

Legend: B sequences, T their padded length, P parts, H query heads, K heads of keys and values, D their size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional
from transformers import AttentionInterface, PreTrainedModel

from agentrl.errors import ConfigError
from agentrl.trainer.parallel.shape import check_context_fit, has_windows

ATTENTION = "agentrl_ulysses"
"""Name under which transformers finds the attention. Without a mask of that name, transformers makes none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceCut:
    """The cut of the sequences of a forward pass over the ranks of a group."""

    group: dist.ProcessGroup
    part: int
    parts: int

    def padded(self, length: int) -> int:
        """Return the length, at least `length`, that the parts divide."""
        return -(-length // self.parts) * self.parts

    def own_tokens(self, input_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return this rank's part of [B, T] ids, [B, T/P], and the positions of its tokens, [1, T/P]."""
        width = input_ids.shape[1] // self.parts
        first = self.part * width
        return input_ids[:, first : first + width], torch.arange(first, first + width, device=input_ids.device)[None]

    def own_wanted(self, positions: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Return this rank's wanted tokens: [m] indices into `positions`, and [m] indices into B x T/P.

        `positions` are [n] indices into B x T, T = `length`.
        """
        width = length // self.parts
        rows, columns = positions // length, positions % length
        own = torch.nonzero(columns // width == self.part)[:, 0]
        return own, rows[own] * width + columns[own] % width

    def gathered(self, values: Tensor, own: Tensor, count: int) -> Tensor:
        """Return [n] values of all ranks; the gradient reaches this rank's own [m]."""
        spread = torch.zeros(count, dtype=values.dtype, device=values.device).index_put((own,), values)
        return _Sum.apply(spread, self.group)  # pyright: ignore[reportReturnType] - typed as Any by torch


def cut_sequences(module: PreTrainedModel, group: dist.ProcessGroup, tp: int = 1) -> SequenceCut:
    """Have `module`, whose heads are split over `tp` ranks already, attend over the parts of sequences that `group` holds.

    Raises:
        ConfigError: its attention cannot be split in this way.
    """
    parts = dist.get_world_size(group)
    if has_windows(module.config):
        raise ConfigError(
            f"trainer.parallel.cp: {type(module).__name__} has layers that attend within a window, which context "
            "parallelism does not support; set it to 1"
        )
    if not getattr(module, "_supports_attention_backend", False):
        raise ConfigError(f"trainer.parallel.cp: the attention of {type(module).__name__} cannot be replaced; set it to 1")
    check_context_fit(parts, tp=tp, heads=module.config.num_attention_heads)
    module.set_attn_implementation(ATTENTION)
    return SequenceCut(group=group, part=dist.get_rank(group), parts=parts)


class _Sum(torch.autograd.Function):
    """The sum over a group. Each rank computes the same loss from it, so the gradient of one rank is the gradient."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: dist.ProcessGroup) -> Tensor:  # noqa: ANN401 - torch's context has no type
        del ctx
        total = values.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # noqa: ANN401 # pyright: ignore[reportIncompatibleMethodOverride] - one output
        del ctx
        return gradient, None


class _Exchange(torch.autograd.Function):
    """Part i of rank j becomes part j of rank i. The exchange is its own transpose, so gradients take the same way."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: dist.ProcessGroup) -> Tensor:  # noqa: ANN401 - torch's context has no type
        ctx.group = group
        return _exchanged(parts, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # noqa: ANN401 # pyright: ignore[reportIncompatibleMethodOverride] - one output
        return _exchanged(gradient, ctx.group), None


def _exchanged(parts: Tensor, group: dist.ProcessGroup) -> Tensor:
    received = torch.empty_like(parts, memory_format=torch.contiguous_format)
    dist.all_to_all_single(received, parts.contiguous(), group=group)
    return received


def _whole_sequences(heads: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return [B, H/P, T, D] of this rank's heads from [B, H, T/P, D] of its part of the sequences."""
    batch, count, width, size = heads.shape
    parts = dist.get_world_size(group)
    by_rank = heads.reshape(batch, parts, count // parts, width, size).movedim(1, 0)
    received: Tensor = _Exchange.apply(by_rank, group)  # pyright: ignore[reportAssignmentType] - typed as Any by torch
    return received.movedim(0, 2).flatten(2, 3)


def _own_part(heads: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return [B, H, T/P, D] of this rank's part of the sequences from [B, H/P, T, D] of its heads."""
    batch, count, length, size = heads.shape
    parts = dist.get_world_size(group)
    by_rank = heads.reshape(batch, count, parts, length // parts, size).movedim(2, 0)
    received: Tensor = _Exchange.apply(by_rank, group)  # pyright: ignore[reportAssignmentType] - typed as Any by torch
    return received.movedim(0, 1).flatten(1, 2)


def ulysses_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    sequence_group: dist.ProcessGroup,
    scaling: float | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """Return causal attention over whole sequences; each rank of `sequence_group` holds a part of them.

    Args:
        module: unused; transformers passes it.
        query: [B, H, T/P, D], rotated by the positions of its tokens.
        key: [B, K, T/P, D], rotated likewise.
        value: [B, K, T/P, D].
        attention_mask: None; sequences are padded on the right.
        sequence_group: the ranks that hold the parts, in order.
        scaling: of the products; None: 1 / sqrt(D).

    Returns:
        [B, T/P, H, D], and None in place of the attention weights.
    """
    del module
    assert attention_mask is None, "sequences are padded on the right and need no mask"
    parts = dist.get_world_size(sequence_group)
    kv_heads = key.shape[1]
    copies = parts // math.gcd(parts, kv_heads)  # P may not divide K; it divides K x copies, and that divides H
    both = torch.cat([key, value]).repeat_interleave(copies, dim=1) if copies > 1 else torch.cat([key, value])
    keys, values = _whole_sequences(both, sequence_group).chunk(2)
    queries = _whole_sequences(query, sequence_group)
    grouped = queries.shape[1] != keys.shape[1]
    output = functional.scaled_dot_product_attention(
        queries, keys, values, is_causal=True, scale=scaling, enable_gqa=grouped
    )
    return _own_part(output, sequence_group).transpose(1, 2).contiguous(), None


AttentionInterface.register(ATTENTION, ulysses_attention)
