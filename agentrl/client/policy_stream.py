"""A call of the policy in pieces.

Invariant: a stream that ends becomes the turn that the same call makes without streaming. One that is left before becomes a
turn of the ids that it gave, unless the episode ends: where it is left may depend on these alone.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import anyio

from agentrl.client.arguments import CallArguments
from agentrl.client.backend import AnswerStream, Delta, Piece
from agentrl.client.deltas import DeltaSplitter
from agentrl.client.given_up import outcome_of
from agentrl.client.offline import CallTimeout, call_timeout
from agentrl.errors import ReplyError, ServerError
from agentrl.inference.backend import GenerateRequest, Generation, GenerationChunk, GivesUp
from agentrl.tokens.graph import Prompt
from agentrl.types import Message, Speaker, StopReason

if TYPE_CHECKING:
    from agentrl.client.policy import PolicyBackend


class PolicyStream(AnswerStream):
    """A call of the policy in pieces."""

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
        self._has_ended = False
        """Whether the last chunk came, or the call failed."""
        self._ends = policy.renderer.eos_ids | set(call.sampling.stop_token_ids)
        self._end_was_sampled = False
        self._text = policy.renderer.incremental_decoder()
        thinking = prompt.extension.thinking_open
        self._splitter = DeltaSplitter(tools=prompt.tools, stops=call.sampling.stop, thinking_open=thinking)

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
        was_left = error is None or isinstance(error, (CallTimeout, anyio.get_cancelled_exc_class()))
        try:
            if was_left and self._num_given and not self._has_ended:
                await self._give_up(is_wanted=error is None)
        finally:
            self._has_ended = True
            await self._close_call(error)

    async def _close_call(self, error: BaseException | None) -> None:
        self._policy.forget_stream(self)
        await self._sampling.__aexit__(type(error) if error else None, error, error.__traceback__ if error else None)

    async def _next_chunk(self) -> GenerationChunk:
        remaining = None if self._deadline is None else max(0.0, self._deadline - anyio.current_time())
        with anyio.move_on_after(remaining):
            if self._chunks is None:
                return await self._first_chunk()
            return await self._chunk_of(self._chunks)
        raise call_timeout(self._policy.episode.id, self._call.timeout_s or 0.0)

    async def _first_chunk(self) -> GenerationChunk:
        policy, inference = self._policy, self._policy.inference
        self.running = policy.episode.start_call()
        policy.open_stream(self)
        if not isinstance(inference, GivesUp):
            return await self._begin()
        # A request cannot be picked up again where a cancellation cut its opening.
        return await outcome_of(
            self._begin,
            give_up=partial(inference.give_up, self._request.request_id),
            end=policy.episode.end,
            late=lambda _: None,  # nothing of it was given
        )

    async def _begin(self) -> GenerationChunk:
        self._chunks = await self._sampling.enter_async_context(self._policy.inference.stream(self._request))
        return await self._chunk_of(self._chunks)

    async def _chunk_of(self, chunks: AsyncIterator[GenerationChunk]) -> GenerationChunk:
        try:
            return await anext(chunks)
        except StopAsyncIteration:
            raise ReplyError(f"request {self._request.request_id}: the stream ended without its last chunk") from None

    async def _give_up(self, *, is_wanted: bool) -> None:
        """Record the ids that came; `is_wanted`: the workflow has what it wants, and the call has not failed."""
        policy, inference, end = self._policy, self._policy.inference, self._policy.episode.end
        chunks, generation = self._chunks, None
        if chunks is None or not isinstance(inference, GivesUp) or end.has_come:
            return
        try:
            with end.bounded():
                await inference.give_up(self._request.request_id)
                while generation is None:
                    generation = (await self._chunk_of(chunks)).generation
        except ServerError:
            generation = None
        if end.has_come:
            return
        given = None if generation is None else _beginning(generation, self._num_given)
        policy.record_given_up(self._prompt, self._request, given, self._speaker, self._splitter.shown())
        if is_wanted and given is not None and self.running is not None:
            self.running.complete()

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


def completion_id(request: GenerateRequest) -> str:
    """Return the completion id of a request, unique over all episodes."""
    return f"chatcmpl-{request.request_id}"


def _beginning(generation: Generation, count: int) -> Generation:
    """Return the first `count` ids of an output as a call that was given up; all of it as it is."""
    if count >= len(generation.output_ids):
        return generation
    return replace(
        generation,
        output_ids=generation.output_ids[:count],
        output_logprobs=generation.output_logprobs[:count],
        spans=tuple(span._replace(end=min(span.end, count)) for span in generation.spans if span.start < count),
        stop_reason=StopReason.ABORT,
        matched_stop=None,
    )
