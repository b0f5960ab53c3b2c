"""Continuous batching: admission, chunked prefill, decode, finish. Synchronous; a step is one forward.

A step has three parts: `begin` chooses its work, `compute` does it, in any thread, and `end` delivers its tokens. Between
`begin` and `end` requests may arrive and end, a pause may begin and the weights may change: a sequence that lost its row
meanwhile gets nothing of the step, and a step that was discarded never happened, but for the time that it took.

Invariant: an unfinished sequence either waits (no row, at its place in the queue) or runs (one row). Each sampled token is
appended once, with the log-prob and the version of the weights that computed its logits. A sequence ends exactly once, in
`_finish`.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from agentrl.errors import RequestRejected
from agentrl.servers.embedded.batching import Chunk, Pace, Piece, RowTable, decoding_rows, plan_pieces
from agentrl.servers.embedded.cache import KVCache
from agentrl.servers.embedded.low_rank import AdapterTokens, ServedAdapter, group_by_adapter
from agentrl.servers.embedded.sampler import Penalties, SampleBatch, Shaping, mix_seed, sample
from agentrl.servers.embedded.sequences import EngineSequence, TextCodec, ending, make_sequence
from agentrl.servers.embedded.served_model import ServedModel, StepInputs, StepWork, VersionWeights
from agentrl.servers.engine import EngineRequest, Finish, Sink

_WORTH_WAITING: Final = 32
"""A request waits a step if another sequence is computing at least this many tokens of their shared prefix."""


class _Scoring(NamedTuple):
    """Prompt tokens whose log-probs a piece of prefill gives."""

    piece: Piece
    start: int
    """Flat index of the hidden state that predicts the first of them."""
    last: int
    """Position in the prompt after the last of them."""
    targets: NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ModelStep:
    """The work of one forward pass; nothing that changes until its end is read from elsewhere, but keys and values."""

    weights: VersionWeights
    batch: StepInputs
    pieces: list[Piece]
    scorings: list[_Scoring]
    decoding: int
    """B: rows that decode, the first of `rows`."""
    rows: NDArray[np.int64]
    """[n] cache rows that sample a token."""
    owners: list[EngineSequence]
    """[n]: their sequences."""
    picked: NDArray[np.int64] | None
    """[n]: their flat tokens; None: all tokens of the step."""
    sampling: SampleBatch
    shaping: Shaping | None


class Computed(NamedTuple):
    """The results of a step."""

    ids: NDArray[np.int64]
    """[n]"""
    logprobs: NDArray[np.float32]
    """[n]"""
    scores: list[list[float]]
    """For each scoring."""
    seconds: float


class Core:
    """Sequences, rows and steps.

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
        model: ServedModel,
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
        self._penalties = Penalties(model.spec.vocab_size, cache.device)
        self._pace = Pace()
        self._current: ModelStep | None = None

    @property
    def num_running(self) -> int:
        """Return how many sequences hold a row."""
        return self._num_running

    def submit(self, request: EngineRequest, sink: Sink, adapter: ServedAdapter | None = None) -> EngineSequence:
        """Queue a request, which `adapter` computes."""
        if request.rid in self.live:
            raise RequestRejected(f"duplicate request id {request.rid!r}: it is still being served", status=400)
        seed = request.sampling.seed
        sequence = make_sequence(
            request,
            sink,
            vocab_size=self.model.spec.vocab_size,
            max_context=self.cache.max_context,
            codec=self._codec,
            eos_ids=self._eos_ids,
            seed=mix_seed(seed) if seed is not None else int(self._random.integers(1 << 63)),
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
        # At the front and in their order, so that a retracted sequence does not wait behind newer ones.
        self.waiting.extendleft(reversed(running))

    def relabel(self, label: str) -> None:
        """Change the version of the weights: tokens sampled from now on carry `label`."""
        self.label = label
        self._labels += 1

    def begin(self, *, admit: bool) -> ModelStep | None:
        """Return the next step, or None if there is no work; `end` comes before another one."""
        if admit:
            self._admit()
        table, cache = self.table, self.cache
        rows = decoding_rows(table, cache)
        pieces = plan_pieces(self._prefilling, cache, self._pace.budget(len(rows), self._num_running))
        if not pieces and not len(rows):
            return None
        work = [Chunk(sequence.row, start, end) for sequence, start, end in pieces]
        adapters = self._adapters(rows, pieces) if self.adapted else ()
        batch = self.model.batch(cache, StepWork(rows, table.last_token[rows], work, adapters))
        sampling, picked = self._sampling_rows(rows, pieces)
        owners = [self._owner(row) for row in sampling.tolist()]
        shaped = np.flatnonzero(table.shaped[sampling]).tolist()
        self._current = ModelStep(
            weights=self.model.weights,
            batch=batch,
            pieces=pieces,
            scorings=self._scorings(pieces, len(rows)),
            decoding=len(rows),
            rows=sampling,
            owners=owners,
            picked=picked,
            sampling=SampleBatch(
                temperature=table.temperature[sampling],
                top_p=table.top_p[sampling],
                top_k=table.top_k[sampling],
                min_p=table.min_p[sampling],
                draws=table.next_draws(sampling),
                cut=table.cut[sampling],
            ),
            shaping=self._penalties.plan((at, owners[at]) for at in shaped) if shaped else None,
        )
        return self._current

    @torch.inference_mode()
    def compute(self, step: ModelStep) -> Computed:
        """Return the results of a step; any thread may call it, one at a time."""
        begin = time.perf_counter()
        model, weights = self.model, step.weights
        hidden = model.hidden(step.batch, self.cache.data, weights)
        scores: list[list[float]] = []
        for scoring in step.scorings:
            states = hidden[scoring.start : scoring.start + len(scoring.targets)]
            logprobs = torch.log_softmax(model.logits(states, weights), -1)
            targets = torch.from_numpy(scoring.targets).to(logprobs.device)
            scores.append(logprobs.gather(1, targets[:, None])[:, 0].tolist())
        if not len(step.rows):
            return Computed(np.empty(0, np.int64), np.empty(0, np.float32), scores, time.perf_counter() - begin)
        if step.picked is not None:
            hidden = hidden[torch.from_numpy(step.picked).to(hidden.device)]
        logits = model.logits(hidden, weights)
        if step.shaping is not None:
            self._penalties.shape(logits, step.shaping)
        sampled = sample(logits, step.sampling)
        ids, logprobs = sampled.ids.cpu().numpy(), sampled.logprobs.cpu().numpy()
        return Computed(ids, logprobs, scores, time.perf_counter() - begin)

    def discard(self) -> None:
        """Have the step that is being computed never have happened; what it wrote is computed again."""
        self._current = None

    def end(self, step: ModelStep, computed: Computed) -> None:
        """Deliver the results of a step to the sequences that kept their rows."""
        table, cache = self.table, self.cache
        kept = self._current is step
        self._current = None
        prefilled = len(step.batch.ids) - step.decoding
        self._pace.measured(prefilled, computed.seconds)
        # A step runs in a thread; meanwhile a sequence may be aborted and its row given to another.
        valid = np.array([kept and table.owners[row] is one for row, one in zip(step.rows, step.owners, strict=True)], bool)
        # Keys and values that are not finite would reach the next owner of the row through masked positions: 0 * NaN is
        # NaN.
        for row in step.rows[~valid & ~np.isfinite(computed.logprobs)].tolist():
            if not cache.owned[row]:
                cache.erase(row)
        if not kept:
            return
        decoded = step.rows[: step.decoding][valid[: step.decoding]]
        cache.lengths[decoded] += 1
        self._end_prefill(step, computed.scores)
        rows, ids, logprobs = step.rows[valid], computed.ids[valid], computed.logprobs[valid]
        if not len(rows):
            return
        if step.shaping is not None:
            owners = [table.owners[row] for row in rows.tolist()]
            for one, token in zip(owners, ids.tolist(), strict=True):
                if one is not None and one.penalized:
                    self._penalties.count(one.request.rid, token)
        cache.tokens[rows, cache.known[rows]] = ids
        cache.known[rows] += 1
        table.advance(rows, ids)
        self._deliver(rows, ids, logprobs)

    def _adapters(self, rows: NDArray[np.int64], chunks: list[Piece]) -> tuple[AdapterTokens, ...]:
        owners = [self._owner(row).adapter for row in rows.tolist()] + [piece.sequence.adapter for piece in chunks]
        counts = [1] * len(rows) + [piece.end - piece.start for piece in chunks]
        return group_by_adapter(owners, counts, self.cache.device)

    def _admit(self) -> None:
        """Give rows to waiting sequences in order of arrival, and reuse the cached prefix of each."""
        held: list[EngineSequence] = []
        while self.waiting and self._num_running < self._max_running:
            sequence = self.waiting.popleft()
            ids = sequence.all_ids()
            # The last token is always computed, since its logits give the next one; so are tokens whose log-probs are
            # asked for.
            limit = min(len(ids) - 1, sequence.scoring_from)
            key = sequence.cache_key
            match = self.cache.match(ids, limit, key) if limit > 0 else None
            # A running sequence computes this prefix now: after a short wait it is reused, as for the members of one
            # group.
            if match is not None and self.cache.owned[match.row] and match.coming - match.length >= _WORTH_WAITING:
                held.append(sequence)
                continue
            row, reused = self.cache.claim(ids, match, key, sequence.request.session)
            self.table.place(sequence, row, self.model.spec.vocab_size)
            self._num_running += 1
            self._prefilling.append(sequence)
            self.prompt_tokens += len(ids)
            self.cached_tokens += reused
            # Counted at the first admission only: after a retraction the sequence would find its own prefix.
            if not sequence.admitted:
                sequence.admitted, sequence.progress.cached_tokens = True, reused
            self._penalties.add(sequence)
        self.waiting.extendleft(reversed(held))

    def _sampling_rows(
        self, rows: NDArray[np.int64], pieces: list[Piece]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64] | None]:
        """Return the rows that sample after this step, and their flat tokens; None: these are all tokens."""
        if not pieces:
            return rows, None
        at = len(rows)
        picked, ready = list(range(at)), rows.tolist()
        for sequence, start, end in pieces:
            at += end - start
            if end == self.cache.known[sequence.row] and sequence.request.sampling.max_new_tokens:
                picked.append(at - 1)
                ready.append(sequence.row)
        return np.array(ready, np.int64), np.array(picked, np.int64)

    def _scorings(self, pieces: list[Piece], at: int) -> list[_Scoring]:
        """Return the prompt tokens whose log-probs, at temperature 1, the logits of each piece predict."""
        found: list[_Scoring] = []
        for piece in pieces:
            sequence, start, end = piece
            first, last = max(sequence.scored, start + 1), min(end + 1, len(sequence.prompt))
            wanted = sequence.scoring_from < len(sequence.prompt) and sequence.progress.input_logprobs is not None
            if wanted and first < last:
                targets = sequence.prompt[first:last].astype(np.int64)
                found.append(_Scoring(piece, at + first - 1 - start, last, targets))
            at += end - start
        return found

    def _end_prefill(self, step: ModelStep, scores: list[list[float]]) -> None:
        """Record the prefilled pieces of the sequences that kept their rows."""
        cache = self.cache
        for scoring, values in zip(step.scorings, scores, strict=True):
            sequence = scoring.piece.sequence
            if sequence.row >= 0 and sequence.progress.input_logprobs is not None:
                sequence.progress.input_logprobs.extend(values)
                sequence.scored = scoring.last
        for sequence, _, end in step.pieces:
            row = sequence.row
            if row < 0:
                continue
            cache.lengths[row] = end
            if end < cache.known[row]:
                continue
            self._prefilling.remove(sequence)
            self.table.decoding[row] = True
            if sequence.request.sampling.max_new_tokens == 0:
                self._finish(sequence, Finish(kind="length"))

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
