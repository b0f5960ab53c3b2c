"""The policy as the backend of an episode: messages or token ids in, exact token ids recorded.

Invariant: a call sends only token ids that the graph holds, and returns only text that those ids decode to. What a server
returns is checked here and in `TokenGraph.append`, whichever server it is. A failed call records nothing. One that the agent
gives up records what was sampled; of a stream, what it was given.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from uuid import uuid4

import anyio
import numpy as np

from agentrl.client.arguments import CallArguments, CallSeeds, checked_messages, read_arguments, read_sampling
from agentrl.client.backend import Answer, AnswerStream, AskedCall, ClientBackend, Delta, Piece, PolicyTokenizer
from agentrl.client.completion import completion_id, token_logprobs
from agentrl.client.config import SamplingConfig
from agentrl.client.deltas import DeltaSplitter
from agentrl.client.demand import Demand, Instructions
from agentrl.client.episode import MISSES_METRIC, CallWaits, Episode, EpisodeSettings
from agentrl.client.offline import CallTimeout
from agentrl.episode.trajectory import are_independent
from agentrl.errors import ContextOverflow, ReplyError, ServerError, ServerUnavailable, WorkflowError
from agentrl.inference.backend import Backend, GenerateRequest, Generation, GenerationChunk, GivesUp, SamplingParams
from agentrl.support.concurrency import outcome_of
from agentrl.tokens.graph import Prompt, TokenGraph
from agentrl.tokens.history import continues_other_branch
from agentrl.tokens.renderer import Renderer
from agentrl.types import BranchPath, Int32Array, Message, Speaker, StopReason, Turn


class PolicyBackend(ClientBackend):
    """Samples one episode from inference servers.

    Calls may run in parallel and be retried; each completed one is a turn. Sub-conversations (other system prompt, other
    tools) are turns of the same episode, too: the graph keeps them as branches.

    Args:
        inference: samples the tokens.
        renderer: chat template and tokenizer of the policy.
        sampling: the default of each sampling argument that a call leaves out.
        settings: of the episode.
        max_context_tokens: context plus output of one call; the model's own limit holds as well.
        seed: of the run; a call without a seed of its own gets one from it, the episode's id and the number of the call, so
            that sampling depends neither on the order of calls nor on restarts. None leaves seeds to the server. Of calls
            with the same seed of their own, only the first keeps it.
        counts_misses: compare answers with what their calls demanded; false for one call whose metrics are not read.
    """

    def __init__(
        self,
        inference: Backend,
        renderer: Renderer,
        sampling: SamplingConfig,
        settings: EpisodeSettings,
        *,
        max_context_tokens: int | None = None,
        seed: int | None = None,
        counts_misses: bool = True,
    ) -> None:
        super().__init__(episode := Episode(settings))
        self.inference, self.renderer, self.sampling = inference, renderer, sampling
        self._seeds, self._counts_misses = CallSeeds(seed, episode.id), counts_misses
        limits = [limit for limit in (max_context_tokens, renderer.max_context) if limit is not None]
        self._max_context = min(limits, default=None)
        self._graph = TokenGraph(
            renderer,
            episode_id=episode.id,
            history=sampling.history,
            max_context=self._max_context,
            clock=episode.clock,
            turns=episode.turns,
        )
        self._instructions = Instructions() if sampling.unsupported == "prompt" else None
        self.waits = CallWaits(episode.id)
        self._streams: set[_PolicyStream] = set()
        """Streams that have begun and are not closed."""

    @property
    def run_sampling(self) -> SamplingConfig:
        """The sampling arguments of the run."""
        return self.sampling

    @property
    def graph(self) -> TokenGraph:
        """The tokens of the turns."""
        return self._graph

    @property
    def tokenizer(self) -> PolicyTokenizer:
        """The tokenizer of the policy."""
        return PolicyTokenizer(self.renderer)

    def adopt(self, turn: Turn) -> None:
        """Add a turn that another model answered; no later call continues it."""
        self._graph.adopt(turn)

    async def answer(self, asked: AskedCall) -> Answer:
        """Return the answer of a call; one that the server cut raises, because it must not look like an answer."""
        messages, call = self.read(asked)
        await self._close_left()
        with self.episode.start_call() as running:
            prompt = self.prepare(messages, call, asked.speaker)
            request = self.request(prompt, call.sampling)
            generation = await self._generate(prompt, request, call.timeout_s, asked.speaker)
            self.check_not_aborted(request, generation)
            turn = self.record(prompt, request, generation, asked.speaker)
            self.compare(messages, call.demand, turn.message)
            running.complete()
        return self.answered(request, call, turn, generation)

    async def stream(self, asked: AskedCall) -> AnswerStream:
        """Return the answer of a call in pieces. Budgets are checked here; sampling begins with the first piece."""
        messages, call = self.read(asked)
        await self._close_left()
        with self.episode.start_call():
            prompt = self.prepare(messages, call, asked.speaker)
            request = self.request(prompt, call.sampling)
        return _PolicyStream(self, messages, call, prompt, request, asked.speaker)

    async def generate(
        self, input_ids: Sequence[int] | Int32Array, speaker: Speaker, timeout: float | None, sampling: Mapping[str, object]
    ) -> Generation:
        """Return the output of a context of token ids, aborted (partial) output included."""
        episode = self.episode
        with episode.refusals():
            params = read_sampling(sampling, self.sampling, vocab_size=self.renderer.vocab_size)
            ids = self._checked_ids(input_ids)
        await self._close_left()
        with episode.start_call() as running:
            parent, end = self._parent_of(ids, speaker.branch)
            prompt = self._graph.prepare_ids(ids[end:], parent)
            request = self.request(prompt, params)
            generation = await self._generate(prompt, request, timeout, speaker)
            self.record(prompt, request, generation, speaker, given=generation)
            running.complete()
        return generation

    async def settle(self) -> None:
        """End the calls that run and close the streams that were left open: what they had sampled is recorded."""
        self.episode.is_settled = True
        await self.waits.cut()
        for stream in tuple(self._streams):
            await stream.close()

    def open_stream(self, stream: _PolicyStream) -> None:
        """Remember a stream that begins: the workflow may leave it without closing it."""
        self._streams.add(stream)

    def forget_stream(self, stream: _PolicyStream) -> None:
        """Forget a stream that is closed."""
        self._streams.discard(stream)

    async def _close_left(self) -> None:
        """Close the streams without a reader, so that the next call may continue what they gave."""
        for stream in tuple(self._streams):
            if stream.running is not None and not stream.running.is_open:
                await stream.close()

    def read(self, asked: AskedCall) -> tuple[list[Message], CallArguments]:
        """Return the messages and arguments of a call, checked."""
        with self.episode.refusals():
            call = read_arguments(
                asked.arguments,
                self.sampling,
                default_timeout=asked.timeout,
                vocab_size=self.renderer.vocab_size,
                by_prompt=self.sampling.unsupported == "prompt",
            )
            return checked_messages(asked.messages), call

    def prepare(self, messages: Sequence[Message], call: CallArguments, speaker: Speaker) -> Prompt:
        """Return the prompt of a call, with the instructions that its demand and those of earlier calls add.

        Raises:
            EpisodeLimit: the messages cannot fit into the context.
        """
        try:
            if self._instructions is not None:
                messages = self._instructions.applied(messages, call.demand)
            return self._graph.prepare(messages, call.tools, speaker.branch)
        except ContextOverflow as error:
            raise self.episode.calls.exceeded(StopReason.CONTEXT_LIMIT, str(error)) from error

    def request(self, prompt: Prompt, sampling: SamplingParams) -> GenerateRequest:
        """Return the request for `prompt`, its output limit lowered to what the context and the token budget leave.

        Raises:
            EpisodeLimit: the context leaves no room for one token.
            WorkflowError: there is no context.
        """
        episode, length = self.episode, prompt.context.size
        if not length:
            raise WorkflowError(f"episode {episode.id}: a model call needs at least one context token")
        room = episode.calls.clip(sampling.max_new_tokens)
        if self._max_context is not None:
            room = min(room, self._max_context - length)
            if room < 1:
                full = f"a context of {length} tokens leaves no room for output: the limit is {self._max_context}"
                raise episode.calls.exceeded(StopReason.CONTEXT_LIMIT, full)
        if room != sampling.max_new_tokens:
            sampling = replace(sampling, max_new_tokens=room)
        sampling = replace(sampling, seed=self._seeds.next(sampling.seed))
        return GenerateRequest(request_id=uuid4().hex, episode_id=episode.id, context=prompt.context, sampling=sampling)

    def check_not_aborted(self, request: GenerateRequest, generation: Generation) -> None:
        """Raise `ServerUnavailable` for an aborted generation: the server cut it, so it is no answer of the policy."""
        if generation.stop_reason is StopReason.ABORT:
            raise ServerUnavailable(
                f"episode {self.episode.id}, request {request.request_id}: the server aborted the call after "
                f"{len(generation.output_ids)} tokens; nothing was recorded, and calling again is safe"
            )

    def record(
        self,
        prompt: Prompt,
        request: GenerateRequest,
        generation: Generation,
        speaker: Speaker,
        *,
        given: object = None,
        shown: Message | None = None,
    ) -> Turn:
        """Append the turn that `generation` makes of `prompt`, and return it; `given` stands for it in `reward`, too.

        `shown` is the answer as far as the workflow got it, where that may be less than the output.

        Raises:
            ReplyError: an empty, mismatched or impossible generation.
        """
        episode = self.episode
        episode.check_open()
        count, limit = len(generation.output_ids), request.sampling.max_new_tokens
        if not 0 < count <= limit:
            what = f"{count} tokens" if count else "an empty completion"
            where = f"episode {episode.id}, request {request.request_id}: the server returned {what}"
            raise ReplyError(f"{where} ({generation.stop_reason}); asked for 1 to {limit}")
        turn = self._graph.append(
            prompt,
            output_ids=generation.output_ids,
            output_logprobs=generation.output_logprobs,
            spans=generation.spans,
            stop_reason=generation.stop_reason,
            matched_stop=generation.matched_stop,
            temperature=request.sampling.temperature,
            truncated_by=request.sampling.truncation(),
            cached_tokens=generation.cached_tokens,
            speaker=speaker,
        )
        if shown is not None:
            self._graph.add_shown(prompt, shown)
        episode.announce(completion_id(request), count, given)
        return episode.turns[turn]

    def compare(self, messages: Sequence[Message], demand: Demand | None, answer: Message) -> None:
        """Count whether a recorded answer misses what its call demanded, as the metric `MISSES_METRIC`."""
        if self._counts_misses and self._instructions is not None and demand is not None:
            self._instructions.remember(messages, demand, answer)
            metrics = self.episode.metrics
            metrics[MISSES_METRIC] = metrics.get(MISSES_METRIC, 0.0) + bool(demand.problem(answer))

    def answered(self, request: GenerateRequest, call: CallArguments, turn: Turn, generation: Generation) -> Answer:
        """Return the answer that a recorded turn is."""
        return Answer(
            id=completion_id(request),
            model=call.model,
            message=turn.message,
            generation=generation,
            num_context=request.context.size,
            logprobs=token_logprobs(self.renderer, generation) if call.logprobs else None,
            prompt_ids=request.context.ids() if call.return_prompt_ids else None,
        )

    def record_given_up(
        self,
        prompt: Prompt,
        request: GenerateRequest,
        generation: Generation | None,
        speaker: Speaker,
        shown: Message | None = None,
    ) -> bool:
        """Record what a call that the agent gave up had sampled, and return whether there is a turn of it.

        `generation` is None where the server did not report it.
        """
        if not self.episode.is_open:
            return False
        if generation is None:
            self.episode.count_unreported()
            return False
        if len(generation.output_ids):
            self.record(prompt, request, generation, speaker, given=generation, shown=shown)
        return len(generation.output_ids) > 0

    async def _generate(
        self, prompt: Prompt, request: GenerateRequest, timeout_s: float | None, speaker: Speaker
    ) -> Generation:
        inference, recorded = self.inference, list[bool]()

        def record_late(generation: Generation | None) -> None:
            recorded.append(self.record_given_up(prompt, request, generation, speaker))

        generate: Callable[[], Awaitable[Generation]] = partial(inference.generate, request)
        if isinstance(inference, GivesUp):
            give_up = partial(inference.give_up, request.request_id)
            generate = partial(outcome_of, generate, give_up=give_up, end=self.episode.end, late=record_late)
        try:
            return await self.waits.bounded(generate, timeout_s, timeout_s)
        except CallTimeout as error:
            error.is_recorded |= any(recorded)
            raise

    def _checked_ids(self, input_ids: Sequence[int] | Int32Array) -> Int32Array:
        """Return the ids of a token-level call, [N] int32; one outside the vocabulary would kill a real server."""
        ids = np.asarray(input_ids)
        if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
            raise WorkflowError(
                f"client.generate takes a list of token ids, got an array of {ids.dtype} with shape {ids.shape}"
            )
        if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < self.renderer.vocab_size:
            bad = int(ids.min()) if int(ids.min()) < 0 else int(ids.max())
            raise WorkflowError(
                f"episode {self.episode.id}: token id {bad} is outside the vocabulary of {self.renderer.vocab_size}; "
                "it was not sent"
            )
        return ids.astype(np.int32)

    def _parent_of(self, ids: Int32Array, branch: BranchPath) -> tuple[int | None, int]:
        """Return the turn with the longest context and output that `ids` begins with, and where it ends; else None, 0."""
        turns = self.episode.turns
        ends: list[int] = []
        begins: list[bool] = []
        best, best_end = None, 0

        def is_foreign(turn: int | None) -> bool:
            return turn is not None and are_independent(turns[turn].branch, branch)

        for index, turn in enumerate(turns):
            at = 0 if turn.parent is None else ends[turn.parent]
            middle = at + len(turn.context_ids)
            end = middle + len(turn.output_ids)
            same = (
                end <= len(ids)
                and (turn.parent is None or begins[turn.parent])
                and np.array_equal(ids[at:middle], turn.context_ids)
                and np.array_equal(ids[middle:end], turn.output_ids)
            )
            ends.append(end)
            begins.append(same)
            if same and (end > best_end or (end == best_end and is_foreign(best))):
                best, best_end = index, end
        if best is not None and is_foreign(best):
            raise continues_other_branch(best, turns[best].branch, branch)
        return best, best_end


class _PolicyStream(AnswerStream):
    """A call of the policy in pieces; where it is left may depend on the ids that came, and on no others."""

    def __init__(
        self,
        policy: PolicyBackend,
        messages: Sequence[Message],
        call: CallArguments,
        prompt: Prompt,
        request: GenerateRequest,
        speaker: Speaker,
    ) -> None:
        super().__init__(completion_id(request), call.model, include_usage=call.include_usage)
        self._policy, self._messages, self._call, self._speaker = policy, messages, call, speaker
        self._prompt, self._request = prompt, request
        self._deadline = None if call.timeout_s is None else anyio.current_time() + call.timeout_s
        self._sampling = AsyncExitStack()
        self._chunks: AsyncIterator[GenerationChunk] | None = None
        self._num_given = 0
        """Ids that came."""
        self._late: Generation | None = None
        """The whole output, where it came with the first ids of a stream that was given up."""
        self._has_ended = False
        """Whether the last chunk came, or the call failed."""
        self._closed: anyio.Event | None = None
        """Comes when the stream is closed; None: nobody has begun to."""
        self._ends = policy.renderer.eos_ids | set(call.sampling.stop_token_ids)
        self._end_was_sampled = False
        self._text = policy.renderer.incremental_decoder()
        thinking = prompt.extension.thinking_open
        form, stops = policy.renderer.tool_format, call.sampling.stop
        self._splitter = DeltaSplitter(form, tools=bool(prompt.tools), stops=stops, thinking_open=thinking)

    async def next(self) -> Sequence[Piece]:
        """Return what new ids settle; at the end the rest and the answer."""
        chunk = await self._next_chunk()
        if chunk.generation is None:
            self._num_given += len(chunk.output_ids)
            return [self._split(chunk.output_ids.tolist())]
        self._has_ended = True
        await self._close_call(None)
        return self._finish(chunk.generation)

    async def close(self, error: BaseException | None = None) -> None:
        """Stop sampling. Unless the last token is in, the request is aborted, and what came is recorded."""
        if self._closed is not None:
            return await self._closed.wait()
        self._closed = anyio.Event()
        was_left = error is None or isinstance(error, (CallTimeout, anyio.get_cancelled_exc_class()))
        try:
            if was_left and self._num_given and not self._has_ended:
                is_recorded = await self._give_up(is_wanted=error is None)
                if isinstance(error, CallTimeout):
                    error.is_recorded |= is_recorded
        finally:
            self._has_ended = True
            self._closed.set()
            await self._close_call(error)

    async def _close_call(self, error: BaseException | None) -> None:
        self._policy.forget_stream(self)
        await self._sampling.__aexit__(type(error) if error else None, error, error.__traceback__ if error else None)

    async def _next_chunk(self) -> GenerationChunk:
        remaining = None if self._deadline is None else max(0.0, self._deadline - anyio.current_time())
        wait = self._first_chunk if self._chunks is None else partial(self._chunk_of, self._chunks)
        return await self._policy.waits.bounded(wait, self._call.timeout_s, remaining)

    async def _first_chunk(self) -> GenerationChunk:
        policy, inference = self._policy, self._policy.inference
        self.running = policy.episode.start_call()
        policy.open_stream(self)
        if not isinstance(inference, GivesUp):
            return await self._begin()
        # A request cannot be picked up again where a cancellation cut its opening.
        give_up = partial(inference.give_up, self._request.request_id)
        return await outcome_of(self._begin, give_up=give_up, end=policy.episode.end, late=self._take_late)

    def _take_late(self, chunk: GenerationChunk | None) -> None:
        """Count the first ids of a stream that was given up before they came."""
        if chunk is not None:
            self._num_given += len(chunk.output_ids)
            self._late = chunk.generation

    async def _begin(self) -> GenerationChunk:
        self._chunks = await self._sampling.enter_async_context(self._policy.inference.stream(self._request))
        return await self._chunk_of(self._chunks)

    async def _chunk_of(self, chunks: AsyncIterator[GenerationChunk]) -> GenerationChunk:
        try:
            return await anext(chunks)
        except StopAsyncIteration:
            raise ReplyError(f"request {self._request.request_id}: the stream ended without its last chunk") from None

    async def _give_up(self, *, is_wanted: bool) -> bool:
        """Record the ids that came, and return whether that was possible; `is_wanted`: the workflow has what it wants."""
        policy, inference, end = self._policy, self._policy.inference, self._policy.episode.end
        chunks, generation = self._chunks, self._late
        if chunks is None or not isinstance(inference, GivesUp) or end.has_come:
            return False
        try:
            with end.bounded():
                await inference.give_up(self._request.request_id)
                while generation is None:
                    generation = (await self._chunk_of(chunks)).generation
        except ServerError:
            generation = None
        if end.has_come:
            return False
        given = None if generation is None else generation.first(self._num_given)
        is_recorded = policy.record_given_up(self._prompt, self._request, given, self._speaker, self._splitter.shown())
        if is_wanted and is_recorded and self.running is not None:
            self.running.complete()
        return is_recorded

    def _split(self, ids: list[int]) -> Delta:
        """Return what new ids settle; an end-of-turn id may or may not be part of the text, so it is left for the end."""
        for at, token_id in enumerate(ids):
            if self._end_was_sampled or token_id in self._ends:
                self._end_was_sampled, ids = True, ids[:at]
                break
        return self._splitter.push(self._text.push(ids)) if ids else Delta("", "")

    def _finish(self, generation: Generation) -> Sequence[Piece]:
        policy, prompt, request, call = self._policy, self._prompt, self._request, self._call
        policy.check_not_aborted(request, generation)
        parsed = policy.renderer.parse(
            generation.output_ids,
            tools=prompt.tools,
            stopped_on=generation.matched_stop,
            thinking_open=prompt.extension.thinking_open,
        )
        rest = self._splitter.rest(parsed.reasoning or "", parsed.content)  # before `record`: a stream that fails is no turn
        turn = policy.record(prompt, request, generation, self._speaker)
        policy.compare(self._messages, call.demand, turn.message)
        if self.running is not None:
            self.running.complete()
        return [rest, policy.answered(request, call, turn, generation)]
