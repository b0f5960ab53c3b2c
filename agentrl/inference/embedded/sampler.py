"""Drawing tokens from logits, and the log-probs reported with them.

Invariant: a token depends on its logits, its request's parameters, seed and position only: never on which other requests
share the batch, nor on when it is computed. Log-probs are those of log_softmax(logits / temperature) before top-k, top-p and
min-p cut it (greedy: at temperature 1); penalties change the logits first, as in SGLang.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agentrl.types import BoolArray

_GOLDEN: Final = 0x9E3779B97F4A7C15
_MASK: Final = (1 << 64) - 1


class Sampled(NamedTuple):
    """One token per row: `ids` [n] int64, `logprobs` [n] float32."""

    ids: Tensor
    logprobs: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleBatch:
    """Parameters of the n rows of logits to sample from; numpy on the CPU."""

    temperature: NDArray[np.float32]
    """[n]; 0 means greedy."""
    top_p: NDArray[np.float32]
    top_k: NDArray[np.int64]
    """[n]; the vocabulary size or more means off."""
    min_p: NDArray[np.float32]
    draws: NDArray[np.float64]
    """[n]: `uniform` of the request's seed and the index of the token among its output tokens."""
    cut: BoolArray
    """[n]: whether top-p, top-k or min-p applies."""


def sample(logits: Tensor, batch: SampleBatch) -> Sampled:
    """Return one token for each row of `logits` [n, V] float32, drawn by inverting the cumulative distribution.

    One uniform number per token, not one per vocabulary entry: several times faster than the exponential race.
    """
    device = logits.device
    plain = bool((batch.temperature == 1).all())
    greedy = batch.temperature <= 0
    if not plain:
        divisor = np.where(greedy, np.float32(1), batch.temperature)
        logits = logits / torch.from_numpy(divisor).to(device)[:, None]
    logprobs = torch.log_softmax(logits, -1)
    if not plain and greedy.all():
        ids = logprobs.argmax(-1)
    else:
        probabilities = logprobs.exp()
        if batch.cut.any():
            rows = np.flatnonzero(batch.cut)
            index = torch.from_numpy(rows).to(device)
            probabilities[index] = _cut(probabilities[index], batch, rows)
        cumulative = probabilities.cumsum(-1, dtype=torch.float64)
        draws = torch.from_numpy(batch.draws).to(device)[:, None]
        ids = torch.searchsorted(cumulative, draws * cumulative[:, -1:], right=True)[:, 0].clamp_(max=logits.shape[1] - 1)
        if not plain and greedy.any():
            ids = torch.where(torch.from_numpy(greedy).to(device), logprobs.argmax(-1), ids)
    return Sampled(ids, logprobs.gather(1, ids[:, None])[:, 0])


def _cut(probabilities: Tensor, batch: SampleBatch, rows: NDArray[np.int64]) -> Tensor:
    """Zero what top-k, top-p and min-p leave out; the most probable token always stays."""

    def column(values: NDArray[np.float32] | NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(values[rows]).to(probabilities.device)[:, None]

    ordered, order = probabilities.sort(dim=-1, descending=True, stable=True)
    keep = torch.arange(ordered.shape[1], device=ordered.device) < column(batch.top_k)
    keep &= ordered.cumsum(-1) - ordered <= column(batch.top_p)
    keep &= ordered >= ordered[:, :1] * column(batch.min_p)
    keep[:, 0] = True
    return torch.zeros_like(ordered).scatter_(1, order, ordered * keep)


def uniform(seeds: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return a number in [0, 1) for each pair of seed and position, by splitmix64 (Steele et al. 2014, figure 17).

    52 bits, so that `draw * total < total` holds after rounding: a token of probability 0 is never drawn.
    """
    x = seeds + (positions.astype(np.uint64) + np.uint64(1)) * np.uint64(_GOLDEN)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return (x >> np.uint64(12)).astype(np.float64) * 2.0**-52


def mix_seed(seed: int) -> int:
    """Return 64 well-spread bits for a request's seed, so that seeds 1 and 2 share no numbers."""
    x = (seed * 0xD1342543DE82EF95 + _GOLDEN) & _MASK
    x = ((x ^ (x >> 32)) * 0xDABA0B6EB09322E3) & _MASK
    return x ^ (x >> 29)
