"""What changes logits before sampling: penalties on tokens sampled before, and minimum lengths.

Invariant: a request's penalties count its output so far, whatever batch it was sampled in, however often it was retracted.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from agentrl.inference.embedded.sequences import Sequence


class Penalties:
    """Counts of the tokens seen by the requests that asked for penalties.

    Args:
        vocab_size: V.
        device: where logits live.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size, self._device = vocab_size, device
        self._index: dict[str, int] = {}
        self._free: list[int] = []
        self._outputs = torch.zeros(0, vocab_size, device=device)
        self._factors = torch.zeros(0, 3, device=device)

    def add(self, sequence: Sequence) -> None:
        """Start counting for a sequence, with the output it has so far; one without penalties is left alone."""
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

    def shape(self, logits: Tensor, sequences: Iterable[tuple[int, Sequence]]) -> list[tuple[int, str]]:
        """Apply penalties and minimum lengths to `logits`, in place.

        Args:
            logits: [n, V].
            sequences: (row of logits, its sequence) of those that have either.

        Returns:
            (row of logits, rid) of the penalized ones, to `count` once a token is sampled.
        """
        held = list(sequences)
        penalized = [(at, sequence.request.rid) for at, sequence in held if sequence.penalized]
        if penalized:
            self._apply(logits, penalized)
        for at, sequence in held:
            if len(sequence.progress.output_ids) < sequence.request.sampling.min_new_tokens:
                logits[at, list(sequence.held_ids)] = -torch.inf
        return penalized

    def _apply(self, logits: Tensor, penalized: list[tuple[int, str]]) -> None:
        """Change the logits of penalized rows by SGLang's formulas: output tokens count, those of the prompt do not."""
        index = self._indices([rid for _, rid in penalized])
        where = torch.tensor([at for at, _ in penalized], device=self._device)
        counts = self._outputs[index]
        frequency, presence, repetition = (column[:, None] for column in self._factors[index].unbind(1))
        seen = counts > 0
        part = logits[where] - counts * frequency - seen * presence
        scale = torch.where(seen, repetition, torch.ones_like(repetition))
        logits[where] = torch.where(part > 0, part / scale, part * scale)

    def count(self, penalized: list[tuple[int, str]], ids: Tensor) -> None:
        """Count the tokens just sampled, [n] int64, for what `shape` returned."""
        index = self._indices([rid for _, rid in penalized])
        self._outputs[index, ids[[at for at, _ in penalized]]] += 1

    def _indices(self, rids: list[str]) -> Tensor:
        return torch.tensor([self._index[rid] for rid in rids], device=self._device)

    def _grow(self) -> None:
        size = len(self._outputs)
        added = max(4, size)
        self._free.extend(range(size + added - 1, size - 1, -1))
        for name in ("_outputs", "_factors"):
            table: Tensor = getattr(self, name)
            setattr(self, name, torch.cat((table, table.new_zeros(added, table.shape[1]))))
