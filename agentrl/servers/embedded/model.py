"""The forward pass: Qwen2, Qwen3 and Llama decoders over a slotted KV cache, equal to HF's to 1e-5.

Invariant: a forward pass reads and writes only the cache rows that its batch names, and every tensor that it makes is on
the model's device. Shape letters: N flat tokens of a step, B decoding sequences, P sequences of a prefill group, C its
longest chunk, R spanned cache rows, L longest context, H heads, K key/value heads, G = H / K, D head_dim, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from agentrl.servers.embedded.low_rank import AdapterTokens, add_low_rank
from agentrl.servers.embedded.products import WidenedProducts, products_for
from agentrl.servers.embedded.spec import ModelSpec
from agentrl.servers.embedded.weights import LayerWeights, ServedWeights


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeRows:
    """The decoding sequences of a step, with one token each: the first B of its flat tokens, in the order of their rows."""

    count: int
    """B."""
    first_row: int
    span: int
    """R: the sequences are in the rows from `first_row` to `first_row + span`."""
    index: Tensor | None
    """[B] int64: row minus `first_row`; None when the rows are exactly those of the span (B = R)."""
    context: int
    """L: longest context, including the new token."""
    mask: Tensor | None
    """[R * K, 1, L]: 0 within the context of a row, -inf elsewhere; None when all rows have exactly L tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillGroup:
    """Sequences of similar chunk length, padded to a rectangle for attention only."""

    rows: Tensor | int
    """[P] int64 cache rows, or a single row."""
    context: int
    """L."""
    gather: Tensor
    """[P, C] int64: the flat token at each place; 0 at padding."""
    tokens: Tensor
    """[n] int64: the flat tokens of the group."""
    places: Tensor
    """[n] int64: their places in the flattened [P * C] rectangle."""
    mask: Tensor
    """[P, 1, C, L]: 0 at positions that a token may attend to, -inf elsewhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBatch:
    """The inputs of one forward pass."""

    ids: Tensor
    """[N] int64."""
    positions: Tensor
    """[N] int64."""
    write: Tensor
    """[N * 2K] int64: the rows for the keys and then the values of each token, in a layer's cache viewed as [-1, D]."""
    decode: DecodeRows | None
    prefill: Sequence[PrefillGroup]
    adapters: Sequence[AdapterTokens] = ()
    """Of the tokens that have one."""


class Transformer:
    """Computes hidden states and logits under one policy version's weights."""

    def __init__(self, spec: ModelSpec, weights: ServedWeights, *, max_context: int) -> None:
        self.spec = spec
        self.weights = weights
        self._eps = torch.tensor(spec.rms_norm_eps, device=weights.embedding.device)
        self._scale = 1.0 / math.sqrt(spec.head_dim)
        reference = weights.embedding
        self._products = products_for(reference)
        frequencies = inverse_frequencies(spec)
        angles = torch.arange(max_context, dtype=torch.float32)[:, None] * frequencies
        cos, sin = angles.cos(), angles.sin()
        table = torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)))
        self._rope = table.to(reference.device, reference.dtype)[:, :, None]  # [2, max_context, 1, D]

    def hidden(self, batch: StepBatch, cache: Tensor, weights: ServedWeights | None = None) -> Tensor:
        """Return the normalized last hidden states, [N, hidden], and write the new keys and values into `cache`.

        Args:
            batch: the tokens of this step.
            cache: [layers, 2, rows, K, max_context, D].
            weights: to compute with, which others may replace meanwhile; None: the present ones.
        """
        weights = weights or self.weights
        linear, onto = self._products.linear, self._products.onto
        x = F.embedding(batch.ids, weights.embedding)
        rope = self._rope.index_select(1, batch.positions).unbind()
        for index, layer in enumerate(weights.layers):
            attended = self._attention(index, layer, self._norm(x, layer.input_norm), rope, batch, cache[index])
            x = onto(x, attended, layer.out, layer.out_bias)
            add_low_rank(x, attended, batch.adapters, index, "out")
            normed = self._norm(x, layer.post_norm)
            gate_up = linear(normed, layer.gate_up, layer.gate_up_bias)
            add_low_rank(gate_up, normed, batch.adapters, index, "gate_up")
            gate, up = gate_up.chunk(2, -1)
            inner = F.silu(gate).mul_(up)
            x = onto(x, inner, layer.down, layer.down_bias)
            add_low_rank(x, inner, batch.adapters, index, "down")
        return self._norm(x, weights.final_norm)

    def logits(self, hidden: Tensor, weights: ServedWeights | None = None) -> Tensor:
        """Return float32 logits, [n, V], of hidden states [n, hidden] under `weights`; None: under the present ones."""
        return self._products.linear(hidden, (weights or self.weights).head).float()

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return `x` divided by its root mean square over the last dimension, times `weight`."""
        if x.dtype != torch.float32:
            return F.rms_norm(x, x.shape[-1:], None, self.spec.rms_norm_eps) * weight
        # The value of F.rms_norm from fewer kernels: a third less time on small batches, and a step has many norms.
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return (x * torch.addcmul(self._eps, norm, norm, value=1 / x.shape[-1]).rsqrt_()).mul_(weight)

    def _attention(
        self, index: int, layer: LayerWeights, x: Tensor, rope: tuple[Tensor, ...], batch: StepBatch, cache: Tensor
    ) -> Tensor:
        spec = self.spec
        heads, keys, dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
        qkv = self._products.linear(x, layer.qkv, layer.qkv_bias)
        add_low_rank(qkv, x, batch.adapters, index, "qkv")
        qkv = qkv.view(-1, heads + 2 * keys, dim)
        rotated = qk = qkv[:, : heads + keys]
        if layer.qk_norm is not None:
            qk = self._norm(qk, layer.qk_norm)
        torch.addcmul(qk * rope[0], torch.roll(qk, dim // 2, -1), rope[1], out=rotated)
        cache.view(-1, dim).index_copy_(0, batch.write, qkv[:, heads:].reshape(-1, dim))
        queries = qkv[:, :heads]
        decode = batch.decode
        if decode is not None and not batch.prefill:
            return self._decode(queries, decode, cache)
        out = x.new_empty(len(x), heads * dim)
        if decode is not None:
            out[: decode.count] = self._decode(queries[: decode.count], decode, cache)
        for group in batch.prefill:
            out[group.tokens] = self._prefill(queries, group, cache)
        return out

    def _decode(self, queries: Tensor, rows: DecodeRows, cache: Tensor) -> Tensor:
        """Attend one query per sequence, [B, H, D] -> [B, H * D], over views of the cache, without a gather."""
        keys, dim = self.spec.num_kv_heads, self.spec.head_dim
        if rows.index is not None:
            spread = queries.new_zeros(rows.span, *queries.shape[1:])
            spread[rows.index] = queries
            queries = spread
        queries = queries.reshape(rows.span * keys, self.spec.groups, dim)
        last = rows.first_row + rows.span
        kv = cache[:, rows.first_row : last].view(2, rows.span * keys, -1, dim)[:, :, : rows.context]
        k, v = kv.unbind()
        if isinstance(self._products, WidenedProducts):
            parts = [self._attend(*part) for part in self._products.parts(queries, k, v, rows.mask)]
            out = torch.cat(parts).to(v.dtype).view(rows.span, -1)
        else:
            out = self._attend(queries, k, v, rows.mask).view(rows.span, -1)
        return out if rows.index is None else out[rows.index]

    def _attend(self, queries: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """Return [n, G, D]: attention of `queries`, [n, G, D], to `k` and `v`, [n, L, D], by `mask`, [n, 1, L]."""
        if v.dtype == torch.bfloat16 and v.device.type == "cpu":
            # `bmm` copies the keys and values of the whole context, which are no contiguous rows of the cache.
            mask = None if mask is None else mask[:, None]
            return F.scaled_dot_product_attention(queries[:, None], k[:, None], v[:, None], attn_mask=mask)[:, 0]
        if mask is None:
            scores = torch.bmm(queries, k.transpose(1, 2)).mul_(self._scale)
        else:
            scores = torch.baddbmm(mask, queries, k.transpose(1, 2), alpha=self._scale)
        probabilities = torch.softmax(scores, -1, dtype=torch.float32)
        return torch.bmm(probabilities if v.dtype == torch.float32 else probabilities.to(v.dtype), v)

    def _prefill(self, queries: Tensor, group: PrefillGroup, cache: Tensor) -> Tensor:
        """Attend the chunks of a group and return [n, H * D] for its tokens."""
        q = queries[group.gather].transpose(1, 2)  # [P, H, C, D]
        if isinstance(group.rows, int):
            kv = cache[:, group.rows : group.rows + 1, :, : group.context]
        else:
            kv = cache[:, :, :, : group.context].index_select(1, group.rows)
        attended = F.scaled_dot_product_attention(q, kv[0], kv[1], attn_mask=group.mask, enable_gqa=self.spec.groups > 1)
        return attended.transpose(1, 2).reshape(-1, q.shape[1] * q.shape[3])[group.places]


def inverse_frequencies(spec: ModelSpec) -> Tensor:
    """Return the rotary frequencies, [D / 2] float32, scaled according to `spec.rope`.

    They are computed in float32 by the operations of HF: a difference of one unit in the last place is 2e-4 radians at
    position 4096.
    Formulas: RoFormer (arXiv 2104.09864) equation 15; `llama3` as in Meta's Llama 3.1 reference code.
    """
    plain = 1.0 / (spec.rope_theta ** (torch.arange(0, spec.head_dim, 2).float() / spec.head_dim))
    rope = spec.rope
    if rope.kind == "default":
        return plain
    if rope.kind == "linear":
        return plain / rope.factor
    wavelength = 2 * math.pi / plain
    longest = rope.original_context / rope.low_freq_factor
    shortest = rope.original_context / rope.high_freq_factor
    smooth = (rope.original_context / wavelength - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    scaled = torch.where(wavelength > longest, plain / rope.factor, plain)
    between = (1 - smooth) * plain / rope.factor + smooth * plain
    return torch.where((wavelength >= shortest) & (wavelength <= longest), between, scaled)
