"""Continuous batching: admission, chunked prefill, decode, finish. Synchronous; one call of `step` is one forward.

Invariant: an unfinished sequence either waits (no row, at its place in the queue) or runs (one row). Each sampled token is
appended once, with the log-prob and the version of the weights that computed its logits. A sequence ends exactly once, in
`_finish`.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from dataclasses import replace
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agentrl.errors import RequestRejected
from agentrl.servers.embedded.batching import Chunk, Pace, Piece, RowTable, build_batch, decoding_rows, plan_pieces
from agentrl.servers.embedded.cache import KVCache
from agentrl.servers.embedded.low_rank import AdapterTokens, ServedAdapter, group_by_adapter
from agentrl.servers.embedded.model import Transformer
from agentrl.servers.embedded.sampler import Penalties, SampleBatch, mix_seed, sample
from agentrl.servers.embedded.sequences import EngineSequence, TextCodec, ending, make_sequence
from agentrl.servers.engine import EngineRequest, Finish, Sink

_WORTH_WAITING: Final = 32
"""A request waits a step if another sequence is computing at least this many tokens of their shared prefix."""


class Core:
    """Sequences, rows and the step; the model's weights are replaced between steps by `set_weights`.

    Args:
        model: computes logits.
        cache: keys and values.
        codec: text for stop strings.
        eos_ids: tokens that end any sequence.
        max_running: sequences that hold a row at once.
        label: version of the weights.
        random_seed: for requests without a seed.
    """

    def __init__(
        self,
        model: Transformer,
        cache: KVCache,
        codec: TextCodec,
        *,
        eos_ids: frozenset[int],
        max_running: int,
        label: str,
        random_seed: int,
    ) -> None:
        self.model, self.cache = model, cache
        self.label = label
        self.output_tokens = self.prompt_tokens = self.cached_tokens = 0
        self.live: dict[str, EngineSequence] = {}
        self.waiting: deque[EngineSequence] = deque()
        self.adapted: Counter[ServedAdapter] = Counter()
        """Unfinished sequences of each adapter that has any."""
        self.table = RowTable(cache.num_rows)
        self._codec = codec
        self._eos_ids = eos_ids
        self._is_eos = np.zeros(model.spec.vocab_size, np.bool_)
        self._is_eos[[token for token in eos_ids if token < model.spec.vocab_size]] = True
        self._max_running = min(max_running, cache.num_rows)
        self._prefilling: list[EngineSequence] = []
        self._num_running = 0
        self._labels = 0
        self._random = np.random.default_rng(random_seed)
        self._penalties = Penalties(model.spec.vocab_size, cache.data.device)
        self._pace = Pace()

    @property
    def num_running(self) -> int:
        """Return how many sequences hold a row."""
        return self._num_running

    def submit(self, request: EngineRequest, sink: Sink, adapter: ServedAdapter | None = None) -> EngineSequence:
        """Queue a request, which `adapter` computes."""
        if request.rid in self.live:
            raise RequestRejected(f"duplicate request id {request.rid!r}: it is still being served", status=400)
        given = request.sampling.seed
        sequence = make_sequence(
            request,
            sink,
            vocab_size=self.model.spec.vocab_size,
            max_context=self.cache.max_context,
            codec=self._codec,
            eos_ids=self._eos_ids,
            seed=mix_seed(given) if given is not None else int(self._random.integers(1 << 63)),
            adapter=adapter,
        )
        if adapter is not None:
            self.adapted[adapter] += 1
        self.live[request.rid] = sequence
        self.waiting.append(sequence)
        return sequence

    def abort(self, sequence: EngineSequence) -> None:
        """Finish a sequence with its partial output; a waiting one is reported in SGLang's short form."""
        waiting = sequence.row < 0
        message = "Abort in waiting queue" if waiting else "Aborted"
        self._finish(sequence, Finish(kind="abort", message=message, reduced=waiting))

    def retract(self) -> None:
        """Put every running sequence back into the queue, ahead of the waiting ones, in order of arrival."""
        running = [sequence for sequence in self.live.values() if sequence.row >= 0]
        for sequence in running:
            self._vacate(sequence)
            sequence.progress.num_retractions += 1
            sequence.forget_scores()
        self.waiting.extendleft(reversed(running))

    def relabel(self, label: str) -> None:
        """Change the version of the weights: tokens sampled from now on carry `label`."""
        self.label = label
        self._labels += 1

    @torch.inference_mode()
    def step(self, *, admit: bool) -> bool:
        """Run one forward and deliver its tokens, or do nothing and return False if there is no work."""
        if admit:
            self._admit()
        chunks = plan_pieces(self._prefilling, self.cache, self._pace.budget)
        rows = decoding_rows(self.table, self.cache)
        if not chunks and not len(rows):
            return False
        begin = time.perf_counter()
        table, cache = self.table, self.cache
        if len(rows):
            cache.reserve(int(cache.known[rows].max()) + 1)
        work = [Chunk(sequence.row, start, end) for sequence, start, end in chunks]
        batch = build_batch(cache, rows, table.last_token[rows], work, num_kv_heads=self.model.spec.num_kv_heads)
        if self.adapted:
            batch = replace(batch, adapters=self._adapters(rows, chunks))
        hidden = self.model.hidden(batch, cache.data)
        cache.lengths[rows] += 1
        if chunks:
            rows, hidden = self._end_prefill(chunks, rows, hidden)
        if len(rows):
            self._sample(rows, self.model.logits(hidden))
        prefilled = len(batch.ids) - (batch.decode.count if batch.decode is not None else 0)
        self._pace.measured(prefilled, time.perf_counter() - begin)
        return True

    def _adapters(self, rows: NDArray[np.int64], chunks: list[Piece]) -> tuple[AdapterTokens, ...]:
        owners = [self._owner(row).adapter for row in rows.tolist()] + [piece.sequence.adapter for piece in chunks]
        counts = [1] * len(rows) + [piece.end - piece.start for piece in chunks]
        return group_by_adapter(owners, counts, self.cache.data.device)

    def _admit(self) -> None:
        """Give rows to waiting sequences in order of arrival, and reuse the cached prefix of each."""
        held: list[EngineSequence] = []
        while self.waiting and self._num_running < self._max_running:
            sequence = self.waiting.popleft()
            ids = sequence.all_ids()
            limit = min(len(ids) - 1, sequence.scoring_from)
            key = sequence.cache_key
            match = self.cache.match(ids, limit, key) if limit > 0 else None
            if match is not None and self.cache.owned[match.row] and match.coming - match.length >= _WORTH_WAITING:
                held.append(sequence)
                continue
            row, reused = self.cache.claim(ids, match, key, sequence.request.session)
            self.table.place(sequence, row, self.model.spec.vocab_size)
            self._num_running += 1
            self._prefilling.append(sequence)
            self.prompt_tokens += len(ids)
            self.cached_tokens += reused
            if not sequence.admitted:
                sequence.admitted, sequence.progress.cached_tokens = True, reused
            self._penalties.add(sequence)
        self.waiting.extendleft(reversed(held))

    def _end_prefill(self, chunks: list[Piece], rows: NDArray[np.int64], hidden: Tensor) -> tuple[NDArray[np.int64], Tensor]:
        """Record the prefilled chunks; return the rows to sample now and their hidden states."""
        at = len(rows)
        picked, ready = list(range(at)), rows.tolist()
        for sequence, start, end in chunks:
            row = sequence.row
            self.cache.lengths[row] = end
            if sequence.scoring_from < len(sequence.prompt):
                self._score(sequence, start, end, hidden[at : at + end - start])
            at += end - start
            if end < self.cache.known[row]:
                continue
            self._prefilling.remove(sequence)
            self.table.decoding[row] = True
            if sequence.request.sampling.max_new_tokens == 0:
                self._finish(sequence, Finish(kind="length"))
                continue
            picked.append(at - 1)
            ready.append(row)
        index = torch.tensor(picked, dtype=torch.int64, device=hidden.device)
        return np.array(ready, np.int64), hidden[index]

    def _score(self, sequence: EngineSequence, start: int, end: int, hidden: Tensor) -> None:
        """Report log-probs, at temperature 1, of the prompt tokens that the logits at `start` to `end` predict."""
        reported = sequence.progress.input_logprobs
        first = max(sequence.scored, start + 1)
        last = min(end + 1, len(sequence.prompt))
        if reported is None or first >= last:
            return
        logprobs = torch.log_softmax(self.model.logits(hidden[first - 1 - start : last - 1 - start]), -1)
        targets = torch.from_numpy(sequence.prompt[first:last].astype(np.int64)).to(logprobs.device)
        reported.extend(logprobs.gather(1, targets[:, None])[:, 0].tolist())
        sequence.scored = last

    def _sample(self, rows: NDArray[np.int64], logits: Tensor) -> None:
        """Sample a token for each row, append it, and finish the sequences that end with it."""
        table, cache = self.table, self.cache
        shaped = np.flatnonzero(table.shaped[rows]).tolist()
        penalized = self._penalties.shape(logits, ((at, self._owner(int(rows[at]))) for at in shaped)) if shaped else []
        sampled = sample(
            logits,
            SampleBatch(
                temperature=table.temperature[rows],
                top_p=table.top_p[rows],
                top_k=table.top_k[rows],
                min_p=table.min_p[rows],
                draws=table.next_draws(rows),
                cut=table.cut[rows],
            ),
        )
        if penalized:
            self._penalties.count(penalized, sampled.ids)
        ids, logprobs = sampled.ids.cpu().numpy(), sampled.logprobs.cpu().numpy()
        cache.tokens[rows, cache.known[rows]] = ids
        cache.known[rows] += 1
        table.advance(rows, ids)
        self._deliver(rows, ids, logprobs)

    def _deliver(self, rows: NDArray[np.int64], ids: NDArray[np.int64], logprobs: NDArray[np.float32]) -> None:
        table = self.table
        stopped = self._is_eos[ids] & ~table.ignore_eos[rows]
        ended = stopped | (table.count[rows] >= table.limit[rows]) | table.watched[rows] | ~np.isfinite(logprobs)
        owners, labels, label = table.owners, self._labels, self.label
        streaming: list[EngineSequence] = []
        self.output_tokens += len(rows)
        row_list = rows.tolist()
        for row, token, logprob in zip(row_list, ids.tolist(), logprobs.tolist(), strict=True):
            sequence = owners[row]
            assert sequence is not None
            progress = sequence.progress
            if sequence.marked != labels:
                sequence.marked = labels
                if not progress.versions or progress.versions[-1][0] != label:
                    progress.versions.append((label, len(progress.output_ids)))
            progress.output_ids.append(token)
            progress.output_logprobs.append(logprob)
            if sequence.request.stream:
                streaming.append(sequence)
        for at in np.flatnonzero(ended).tolist():
            self._end(self._owner(row_list[at]), int(ids[at]), bool(stopped[at]), bool(np.isfinite(logprobs[at])))
        for sequence in streaming:
            if sequence.progress.finish is None:
                sequence.sink.progress(sequence.progress)

    def _end(self, sequence: EngineSequence, token: int, stopped: bool, finite: bool) -> None:
        """Finish a sequence whose last token may end it."""
        if finite:
            finish = ending(sequence, token, is_eos=stopped, codec=self._codec)
            if finish is not None:
                self._finish(sequence, finish)
            return
        # The log-prob is unusable: drop the token and the values of its row.
        sequence.drop_last()
        row = sequence.row
        self._finish(sequence, Finish(kind="abort", message="logits are not finite under these weights"))
        self.cache.erase(row)

    def _owner(self, row: int) -> EngineSequence:
        sequence = self.table.owners[row]
        assert sequence is not None, f"row {row} has no sequence"
        return sequence

    def _vacate(self, sequence: EngineSequence) -> None:
        """Take the row from a running sequence; its computed prefix stays in the cache."""
        row = sequence.row
        if not self.table.decoding[row]:
            self._prefilling.remove(sequence)
        self.table.remove(row)
        self.cache.release(row)
        self._penalties.remove(sequence.request.rid)
        self._num_running -= 1

    def _finish(self, sequence: EngineSequence, finish: Finish) -> None:
        del self.live[sequence.request.rid]
        if sequence.adapter is not None:
            self.adapted[sequence.adapter] -= 1
            self.adapted = +self.adapted
        if sequence.row >= 0:
            self._vacate(sequence)
        else:
            self.waiting.remove(sequence)
        sequence.progress.finish = finish
        sequence.sink.finish(sequence.progress)
