"""Continuous batching: admission, chunked prefill, decode, finish. Synchronous; one call of `step` is one forward.

Invariant: an unfinished sequence is either waiting (no row, at its place in the queue) or running (one row); each sampled
token is appended once, with the log-prob and the name of the weights that made its logits; a sequence leaves through
`_finish` only, and only once.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agentrl.errors import RequestRejected
from agentrl.inference.embedded.batching import Chunk, build_batch
from agentrl.inference.embedded.cache import KVCache
from agentrl.inference.embedded.model import Transformer
from agentrl.inference.embedded.rows import RowTable, Sequence
from agentrl.inference.embedded.sampler import Penalties, SampleBatch, mix_seed, sample
from agentrl.inference.embedded.text import TextCodec
from agentrl.inference.engine import EngineRequest, Finish, Progress, Sink

_CHUNK: Final = 512
"""Longest prefill chunk of one sequence, tokens: bounds the attention mask."""
_MIN_BUDGET: Final = 64
_MAX_BUDGET: Final = 2048
"""Prefill tokens of one step, whatever the machine's speed."""
_STEP_SECONDS: Final = 0.05
"""Prefill work aimed at per step: how long HTTP may wait for the event loop."""
_WORTH_WAITING: Final = 32
"""Tokens of a shared prompt that another sequence is computing now, for which a request is held back a step."""


class Core:
    """Sequences, rows and the step.

    Args:
        model: computes logits; its weights are replaced between steps by `set_weights`.
        cache: keys and values.
        codec: text for stop strings.
        eos_ids: tokens that end any sequence.
        max_running: sequences that hold a row at once.
        label: name of the weights.
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
        self.waiting: deque[Sequence] = deque()
        self.table = RowTable(cache.num_rows)
        self._codec = codec
        self._eos_ids = eos_ids
        self._is_eos = np.zeros(model.spec.vocab_size, np.bool_)
        self._is_eos[[token for token in eos_ids if token < model.spec.vocab_size]] = True
        self._max_running = min(max_running, cache.num_rows)
        self._live: dict[str, Sequence] = {}
        self._prefilling: list[Sequence] = []
        self._num_running = 0
        self._labels = 0
        self._random = np.random.default_rng(random_seed)
        self._penalties = Penalties(model.spec.vocab_size, cache.data.device)
        self._seconds_per_token = _STEP_SECONDS / 512

    @property
    def num_running(self) -> int:
        """Return how many sequences hold a row."""
        return self._num_running

    @property
    def num_live(self) -> int:
        """Return how many sequences are unfinished."""
        return len(self._live)

    def submit(self, request: EngineRequest, sink: Sink) -> None:
        """Queue a request.

        Raises:
            RequestRejected: for a duplicate rid, ids or lengths out of range, or stop strings without a tokenizer.
        """
        if request.rid in self._live:
            raise RequestRejected(f"duplicate request id {request.rid!r}: it is still being served", status=400)
        sampling, prompt = request.sampling, np.array(request.input_ids, np.int32)
        if not len(prompt) or int(prompt.min()) < 0 or int(prompt.max()) >= self.model.spec.vocab_size:
            raise RequestRejected(f"input_ids must be 1 or more ids below {self.model.spec.vocab_size}", status=400)
        if len(prompt) + sampling.max_new_tokens > self.cache.max_context:
            raise RequestRejected(
                f"{len(prompt)} prompt tokens and {sampling.max_new_tokens} to sample exceed the context of "
                f"{self.cache.max_context}",
                status=400,
            )
        if sampling.stop and not self._codec.available:
            raise RequestRejected("this server has no tokenizer: use stop_token_ids instead of stop strings", status=400)
        seed = mix_seed(sampling.seed) if sampling.seed is not None else int(self._random.integers(1 << 63))
        sequence = Sequence(
            request=request,
            sink=sink,
            progress=Progress(request=request, input_logprobs=[None] if request.logprob_start_len >= 0 else None),
            prompt=prompt,
            seed=seed,
            stop_ids=frozenset() if sampling.ignore_eos else frozenset(sampling.stop_token_ids),
            window=max((len(stop.encode()) for stop in sampling.stop), default=-1) + 1,
            penalized=bool(sampling.frequency_penalty or sampling.presence_penalty or sampling.repetition_penalty != 1),
        )
        sequence.scored = max(request.logprob_start_len, 0) + 1
        self._live[request.rid] = sequence
        self.waiting.append(sequence)

    def abort(self, rid: str, *, abort_all: bool, exact: bool) -> int:
        """Finish the named sequences with what they have."""
        if exact:
            chosen = [self._live[rid]] if rid in self._live else []
        else:
            chosen = [s for name, s in self._live.items() if abort_all or (rid and name.startswith(rid))]
        for sequence in chosen:
            self._finish(sequence, Finish(kind="abort", message="Aborted by request"))
        return len(chosen)

    def retract(self) -> None:
        """Put every running sequence back into the queue, before those that wait, in order of arrival."""
        running = [sequence for sequence in self._live.values() if sequence.row >= 0]
        for sequence in running:
            self._vacate(sequence)
            sequence.progress.num_retractions += 1
            if sequence.scored < len(sequence.prompt) and sequence.progress.input_logprobs is not None:
                sequence.progress.input_logprobs = [None]
                sequence.scored = sequence.request.logprob_start_len + 1
        self.waiting.extendleft(reversed(running))

    def relabel(self, label: str) -> None:
        """Name the weights: tokens sampled from now on are marked with `label`."""
        self.label = label
        self._labels += 1

    @torch.inference_mode()
    def step(self, *, admit: bool) -> bool:
        """Run one forward and deliver its tokens; return False, doing nothing, when there is nothing to compute."""
        if admit:
            self._admit()
        chunks = self._plan_chunks()
        rows = self._decoding_rows()
        if not chunks and not len(rows):
            return False
        begin = time.perf_counter()
        table, cache = self.table, self.cache
        if len(rows):
            cache.reserve(int(cache.known[rows].max()) + 1)
        work = [Chunk(sequence.row, start, end) for sequence, start, end in chunks]
        batch = build_batch(cache, rows, table.last_token[rows], work, num_kv_heads=self.model.spec.num_kv_heads)
        hidden = self.model.hidden(batch, cache.data)
        cache.lengths[rows] += 1
        if chunks:
            rows, hidden = self._end_prefill(chunks, rows, hidden)
        if len(rows):
            self._sample(rows, self.model.logits(hidden))
        prefilled = len(batch.ids) - (batch.decode.count if batch.decode is not None else 0)
        if prefilled >= _MIN_BUDGET:
            self._seconds_per_token += 0.2 * ((time.perf_counter() - begin) / prefilled - self._seconds_per_token)
        return True

    def _admit(self) -> None:
        """Give rows to waiting sequences, first come first served, reusing what the cache holds of their tokens."""
        held: list[Sequence] = []
        while self.waiting and self._num_running < self._max_running:
            sequence = self.waiting.popleft()
            ids = sequence.all_ids()
            limit = min(len(ids) - 1, sequence.scoring_from)
            match = self.cache.match(ids, limit) if limit > 0 else None
            if match is not None and self.cache.owned[match.row] and match.coming - match.length >= _WORTH_WAITING:
                held.append(sequence)
                continue
            row, reused = self.cache.claim(ids, match)
            self.table.place(sequence, row, self.model.spec.vocab_size)
            self._num_running += 1
            self._prefilling.append(sequence)
            self.prompt_tokens += len(ids)
            self.cached_tokens += reused
            if not sequence.admitted:
                sequence.admitted, sequence.progress.cached_tokens = True, reused
            if sequence.penalized:
                sampling = sequence.request.sampling
                factors = (sampling.frequency_penalty, sampling.presence_penalty, sampling.repetition_penalty)
                output = sequence.progress.output_ids
                self._penalties.add(sequence.request.rid, factors, prompt=sequence.prompt.tolist(), output=output)
        self.waiting.extendleft(reversed(held))

    def _plan_chunks(self) -> list[tuple[Sequence, int, int]]:
        """Return the prefill work of this step: as many tokens as fit the time aimed at, oldest sequence first."""
        budget = int(min(max(_STEP_SECONDS / self._seconds_per_token, _MIN_BUDGET), _MAX_BUDGET))
        chunks: list[tuple[Sequence, int, int]] = []
        for sequence in self._prefilling:
            if budget <= 0:
                break
            start = int(self.cache.lengths[sequence.row])
            end = min(int(self.cache.known[sequence.row]), start + min(budget, _CHUNK))
            chunks.append((sequence, start, end))
            budget -= end - start
        return chunks

    def _decoding_rows(self) -> NDArray[np.int64]:
        """Return the decoding rows, ascending, moved together first where over a quarter of their span is idle."""
        rows = np.flatnonzero(self.table.decoding)
        count = len(rows)
        if count and 3 * (rows[-1] - rows[0] + 1) > 4 * count:
            first = min(int(rows[0]), self.cache.num_rows - count)
            block = np.arange(first, first + count)
            outside = rows[(rows < first) | (rows >= first + count)]
            for hole, row in zip(block[~self.table.decoding[block]].tolist(), outside.tolist(), strict=True):
                self.cache.swap(hole, row)
                self.table.swap(hole, row)
            rows = block
        return rows

    def _end_prefill(
        self, chunks: list[tuple[Sequence, int, int]], rows: NDArray[np.int64], hidden: Tensor
    ) -> tuple[NDArray[np.int64], Tensor]:
        """Book what was prefilled; return the rows to sample now and their hidden states."""
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

    def _score(self, sequence: Sequence, start: int, end: int, hidden: Tensor) -> None:
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
        shaped = self._shape(rows, logits) if table.shaped[rows].any() else []
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
        if shaped:
            self._penalties.count([rid for _, rid in shaped], sampled.ids[[at for at, _ in shaped]])
        ids, logprobs = sampled.ids.cpu().numpy(), sampled.logprobs.cpu().numpy()
        cache.tokens[rows, cache.known[rows]] = ids
        cache.known[rows] += 1
        table.advance(rows, ids)
        self._deliver(rows, ids, logprobs)

    def _shape(self, rows: NDArray[np.int64], logits: Tensor) -> list[tuple[int, str]]:
        """Apply penalties and minimum lengths to `logits`, in place; return the (row of logits, rid) of those counted."""
        penalized: list[tuple[int, str]] = []
        for at in np.flatnonzero(self.table.shaped[rows]).tolist():
            sequence = self._owner(int(rows[at]))
            if sequence.penalized:
                penalized.append((at, sequence.request.rid))
        if penalized:
            self._penalties.apply(logits, [at for at, _ in penalized], [rid for _, rid in penalized])
        for at in np.flatnonzero(self.table.shaped[rows]).tolist():
            sequence = self._owner(int(rows[at]))
            if len(sequence.progress.output_ids) < sequence.request.sampling.min_new_tokens:
                logits[at, list(self._eos_ids | sequence.stop_ids)] = -torch.inf
        return penalized

    def _deliver(self, rows: NDArray[np.int64], ids: NDArray[np.int64], logprobs: NDArray[np.float32]) -> None:
        table = self.table
        stopped = self._is_eos[ids] & ~table.ignore_eos[rows]
        ended = stopped | (table.count[rows] >= table.limit[rows]) | table.watched[rows] | ~np.isfinite(logprobs)
        owners, labels, label = table.owners, self._labels, self.label
        streaming: list[Sequence] = []
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

    def _end(self, sequence: Sequence, token: int, stopped: bool, finite: bool) -> None:
        """Finish a sequence whose last token may end it."""
        progress = sequence.progress
        if not finite:
            # The number is unusable: drop the token, and the row's values with it.
            progress.output_ids.pop()
            progress.output_logprobs.pop()
            if progress.versions and progress.versions[-1][1] == len(progress.output_ids):
                progress.versions.pop()
            row = sequence.row
            self._finish(sequence, Finish(kind="abort", message="logits are not finite under these weights"))
            self.cache.erase(row)
        elif stopped or token in sequence.stop_ids:
            self._finish(sequence, Finish(kind="stop", matched=token))
        elif (match := self._stop_string(sequence)) is not None:
            self._finish(sequence, Finish(kind="stop", matched=match))
        elif len(progress.output_ids) >= sequence.request.sampling.max_new_tokens:
            self._finish(sequence, Finish(kind="length"))

    def _stop_string(self, sequence: Sequence) -> str | None:
        """Return the stop string that the last token completed."""
        if not sequence.window:
            return None
        tail = self._codec.decode(sequence.progress.output_ids[-sequence.window :], skip_special_tokens=False)
        return next((stop for stop in sequence.request.sampling.stop if stop in tail), None)

    def _owner(self, row: int) -> Sequence:
        sequence = self.table.owners[row]
        assert sequence is not None, f"row {row} has no sequence"
        return sequence

    def _vacate(self, sequence: Sequence) -> None:
        """Take a running sequence's row; what was computed stays in the cache."""
        row = sequence.row
        if not self.table.decoding[row]:
            self._prefilling.remove(sequence)
        self.table.remove(row)
        self.cache.release(row)
        self._penalties.remove(sequence.request.rid)
        self._num_running -= 1

    def _finish(self, sequence: Sequence, finish: Finish) -> None:
        del self._live[sequence.request.rid]
        if sequence.row >= 0:
            self._vacate(sequence)
        else:
            self.waiting.remove(sequence)
        sequence.progress.finish = finish
        sequence.sink.finish(sequence.progress)
