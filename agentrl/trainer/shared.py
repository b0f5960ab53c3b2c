"""Attention in a forward pass whose sequences share the computation of their common prefixes.

Everything else in a decoder works token by token, so only attention and positions know that a row is a tree. On a CPU each
run of the row attends to its prefix and to itself: there are as many products as sequences. On a GPU one kernel takes the
whole row (agentrl.trainer.flex).

Invariant: hidden states and gradients are those of the sequences computed one by one.

Legend: N tokens of the row, H query heads, K heads of keys and values, D their size, S tokens of a run, P of its prefix.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.bias import CausalBias, causal_lower_right
from torch.nn.attention.flex_attention import BlockMask
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from agentrl.algo.prefixes import TokenTree
from agentrl.trainer.flex import LEAST_SIZE, tree_attention, tree_mask
from agentrl.trainer.parallel.shape import has_windows, reason_against_sharing

SHARED_ATTENTION = "agentrl_shared_prefixes"
"""Name under which transformers finds the attention. Without a mask of that name, transformers makes none."""


class SharedRun(NamedTuple):
    """A run of the row: the parts of the row that it attends to, by number, its own ones last."""

    parts: range | tuple[int, ...]
    mask: Tensor | None
    """[S, P + S], what it attends to: a bias of torch, or 0 and -inf for its tokens in reverse; None: it has no prefix."""


@dataclass(frozen=True, slots=True)
class SharedRow:
    """The tree that a row of tokens is."""

    depths: Tensor
    """[1, N] int64: place of each token in its sequences."""
    run_lengths: list[int]
    part_lengths: list[int]
    """Of the parts into which runs and prefixes cut the row; a gradient flows back once for each part."""
    runs: list[SharedRun]
    mask: BlockMask | None
    """Of the whole row, for one kernel; None: it is computed run by run."""


def shared_row(tree: TokenTree, device: torch.device, *, one_kernel: bool | None = None) -> SharedRow:
    """Return `tree` as the attention reads it; `one_kernel`: whether by FlexAttention, None: on GPUs."""
    edges = {0, len(tree.token_ids)}
    for run in tree.runs:
        edges |= {run.start, run.stop} | {edge for part in run.prefix for edge in part}
    cuts = sorted(edges)

    def numbers(start: int, stop: int) -> range:
        return range(bisect_left(cuts, start), bisect_left(cuts, stop))

    runs: list[SharedRun] = []
    for run in tree.runs:
        before = tuple(number for part in run.prefix for number in numbers(*part))
        parts = (*before, *numbers(run.start, run.stop))
        runs.append(SharedRun(parts, _mask(run.stop - run.start, sum(b - a for a, b in run.prefix), device)))
    return SharedRow(
        depths=torch.from_numpy(tree.depths).long().to(device)[None],
        run_lengths=[run.stop - run.start for run in tree.runs],
        part_lengths=[after - before for before, after in pairwise(cuts)],
        runs=runs,
        mask=tree_mask(tree.ends, device) if (device.type == "cuda" if one_kernel is None else one_kernel) else None,
    )


def can_share_prefixes(module: PreTrainedModel) -> bool:
    """Return whether `module` can compute rows that are trees; `reason_against_sharing` says why not."""
    config = module.config
    return reason_against_sharing(config.model_type, has_windows=has_windows(config), cp=1) is None


def share_prefixes(module: PreTrainedModel) -> None:
    """Let `module` compute rows that are trees, from the first such row on."""
    if module.config._attn_implementation != SHARED_ATTENTION:  # pyright: ignore[reportPrivateUsage]
        module.set_attn_implementation(SHARED_ATTENTION)


def shared_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    *,
    shared_row: SharedRow | None = None,
    scaling: float | None = None,
    **more: object,
) -> tuple[Tensor, None]:
    """Return causal attention over the sequences of `shared_row`, or over plain sequences without one.

    Args:
        module: the layer; transformers passes it.
        query: [1, H, N, D], rotated by the positions of its tokens.
        key: [1, K, N, D], rotated likewise.
        value: [1, K, N, D].
        mask: None; sequences are padded on the right.
        shared_row: the tree.
        scaling: of the products; None: 1 / sqrt(D).
        more: further options of transformers' own attention.

    Returns:
        [1, N, H, D], and None in place of the attention weights.
    """
    if shared_row is None:
        return sdpa_attention_forward(module, query, key, value, mask, scaling=scaling, **more)  # pyright: ignore[reportArgumentType]
    assert mask is None, "a row has its masks by run"
    if shared_row.mask is not None and query.shape[-1] >= LEAST_SIZE:
        return tree_attention(query, key, value, shared_row.mask, scaling).transpose(1, 2).contiguous(), None
    grouped = query.shape[1] != key.shape[1]
    parts = torch.stack([key, value]).split(shared_row.part_lengths, dim=3)
    outputs: list[Tensor] = []
    for run, own in zip(shared_row.runs, query.split(shared_row.run_lengths, dim=2), strict=True):
        keys, values = torch.cat([parts[number] for number in run.parts], dim=3)
        in_reverse = run.mask is not None and not isinstance(run.mask, CausalBias)
        output = functional.scaled_dot_product_attention(
            own.flip(2) if in_reverse else own,
            keys,
            values,
            attn_mask=run.mask,
            is_causal=run.mask is None,
            scale=scaling,
            enable_gqa=grouped,
        )
        outputs.append(output.flip(2) if in_reverse else output)
    return torch.cat(outputs, dim=2).transpose(1, 2).contiguous(), None


def _mask(own: int, before: int, device: torch.device) -> Tensor | None:
    if not before:
        return None
    length = before + own
    if device.type == "cuda":
        return causal_lower_right(own, length)  # kernels know it, so it takes no memory
    # The last token sees all, the one before it all but one, and so on. With the last one first, each row of the mask is the
    # row before, moved by one: all are stretches of one line. A mask of S x (P + S) floats would be kept for each layer.
    line = torch.zeros(own + length - 1, device=device)
    line[length:] = -torch.inf
    return line.as_strided((own, length), (1, 1))


AttentionInterface.register(SHARED_ATTENTION, shared_attention)
