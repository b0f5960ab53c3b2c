"""Sampling: penalties and minimum lengths on the logits, the draw of a token, and its log-prob.

Invariant: a token depends only on its logits and on its request's parameters, seed and position, not on the other requests
of the batch or the time of the step. Log-probs are those of log_softmax(logits / temperature) before top-k, top-p and min-p
truncate it (greedy: at temperature 1); penalties change the logits first, as in SGLang. The penalties of a request count its
output so far, through retractions too.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agentrl.servers.embedded.sequences import EngineSequence
from agentrl.types import BoolArray


class Shaping(NamedTuple):
    """The changes of the logits of one step."""

    penalized: list[tuple[int, str]]
    """(row of logits, rid) of each request that has penalties."""
    places: Tensor
    """Where their counts are."""
    short: list[tuple[int, list[int]]]
    """(row of logits, tokens that it must not sample yet)."""


class Penalties:
    """Token counts of the requests that have penalties."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size, self._device = vocab_size, device
        self._index: dict[str, int] = {}
        self._free: list[int] = []
        self._outputs = torch.zeros(0, vocab_size, device=device)
        self._factors = torch.zeros(0, 3, device=device)

    def add(self, sequence: EngineSequence) -> None:
        """Start counting for a sequence, beginning with its output so far; ignore one without penalties."""
        if not sequence.penalized:
            return
        if not self._free:
            self._grow()
        index = self._index[sequence.request.rid] = self._free.pop()
        output, sampling = sequence.progress.output_ids, sequence.request.sampling
        outputs = torch.bincount(torch.tensor(output, dtype=torch.int64), minlength=self._vocab_size)
        factors = (sampling.frequency_penalty, sampling.presence_penalty, sampling.repetition_penalty)
        self._outputs[index] = outputs.to(self._device, torch.float32)
        self._factors[index] = torch.tensor(factors, device=self._device)

    def remove(self, rid: str) -> None:
        """Stop counting; unknown requests are ignored."""
        index = self._index.pop(rid, None)
        if index is not None:
            self._free.append(index)

    def plan(self, sequences: Iterable[tuple[int, EngineSequence]]) -> Shaping:
        """Return what `shape` does; given (row of logits, its sequence) for each that has a penalty or a minimum length."""
        held = list(sequences)
        penalized = [(at, sequence.request.rid) for at, sequence in held if sequence.penalized]
        short = [
            (at, list(sequence.held_ids))
            for at, sequence in held
            if len(sequence.progress.output_ids) < sequence.request.sampling.min_new_tokens
        ]
        return Shaping(penalized, self._indices([rid for _, rid in penalized]), short)

    def shape(self, logits: Tensor, shaping: Shaping) -> None:
        """Apply penalties and minimum lengths to `logits`, [n, V], in place."""
        if shaping.penalized:
            self._apply(logits, shaping)
        for at, held_ids in shaping.short:
            logits[at, held_ids] = -torch.inf

    def _apply(self, logits: Tensor, shaping: Shaping) -> None:
        """Change the logits of penalized rows by SGLang's formulas: output tokens count, those of the prompt do not."""
        index = shaping.places
        where = torch.tensor([at for at, _ in shaping.penalized], device=self._device)
        counts = self._outputs[index]
        frequency, presence, repetition = (column[:, None] for column in self._factors[index].unbind(1))
        seen = counts > 0
        part = logits[where] - counts * frequency - seen * presence
        scale = torch.where(seen, repetition, torch.ones_like(repetition))
        logits[where] = torch.where(part > 0, part / scale, part * scale)

    def count(self, rid: str, token: int) -> None:
        """Count a sampled token of a request; one without penalties is ignored."""
        index = self._index.get(rid)
        if index is not None:
            self._outputs[index, token] += 1

    def _indices(self, rids: list[str]) -> Tensor:
        return torch.tensor([self._index[rid] for rid in rids], dtype=torch.int64, device=self._device)

    def _grow(self) -> None:
        size = len(self._outputs)
        added = max(4, size)
        self._free.extend(range(size + added - 1, size - 1, -1))
        self._outputs = torch.cat((self._outputs, self._outputs.new_zeros(added, self._vocab_size)))
        self._factors = torch.cat((self._factors, self._factors.new_zeros(added, 3)))


_GOLDEN: Final = 0x9E3779B97F4A7C15
_MASK: Final = (1 << 64) - 1


class Sampled(NamedTuple):
    """A token per row: `ids` [n] int64, `logprobs` [n] float32."""

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
            probabilities[index] = _truncate(probabilities[index], batch, rows)
        cumulative = probabilities.cumsum(-1, dtype=torch.float64)
        draws = torch.from_numpy(batch.draws).to(device)[:, None]
        ids = torch.searchsorted(cumulative, draws * cumulative[:, -1:], right=True)[:, 0].clamp_(max=logits.shape[1] - 1)
        if not plain and greedy.any():
            ids = torch.where(torch.from_numpy(greedy).to(device), logprobs.argmax(-1), ids)
    return Sampled(ids, logprobs.gather(1, ids[:, None])[:, 0])


def _truncate(probabilities: Tensor, batch: SampleBatch, rows: NDArray[np.int64]) -> Tensor:
    """Zero the probabilities that top-k, top-p and min-p exclude; the most probable token always stays."""

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
