"""A model call as a stream of `ChatCompletionChunk`.

Invariant: the chunks add up to what the same call returns without streaming; the turn is recorded when the last token is
in, and a stream that is left before records nothing.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack

import anyio
from openai import AsyncStream
from openai.types.chat import ChatCompletionChunk

from agentrl.client.arguments import CallArguments
from agentrl.client.deltas import Delta, DeltaSplitter
from agentrl.client.episode import Episode, completion_id
from agentrl.client.ledger import Place
from agentrl.client.replies import chunk, chunk_header, finish_reason, token_logprobs, usage
from agentrl.client.surface import CallTimeout, timed_out
from agentrl.errors import ReplyError
from agentrl.inference.base import Generation, GenerationChunk
from agentrl.types import Message


class StreamResponse:
    """What `AsyncStream.response` is asked for: headers, and closing."""

    status_code = 200

    def __init__(self, stream: ChatStream, request_id: str) -> None:
        # A stream that nobody holds must go at once, and its place in the turn budget with it: no cycle.
        self._stream = weakref.ref(stream)
        self.headers: Mapping[str, str] = {"content-type": "text/event-stream", "x-request-id": request_id}

    async def aclose(self) -> None:
        """Close the stream."""
        stream = self._stream()
        if stream is not None:
            await stream.close()


class ChatStream(AsyncStream[ChatCompletionChunk]):
    """The chunks of one call; iterate it in one task, and leave it early with `async with` or `close()`.

    Budgets are checked, and the prompt is made, when it is created; sampling begins with the first chunk. Log-probs, where
    asked for, and the sampled ids (`choices[0].token_ids`) come with the chunk that has the `finish_reason`.
    """

    def __init__(self, episode: Episode, messages: Sequence[Message], call: CallArguments) -> None:
        # AsyncStream.__init__ would read a response; there is none.
        self._episode = episode
        self._call = call
        self._ready: deque[ChatCompletionChunk] = deque()
        self._done = False
        self._sampling = AsyncExitStack()
        self._chunks: AsyncIterator[GenerationChunk] | None = None
        with episode.call():
            self._prompt = prompt = episode.graph.prepare(messages, call.tools)
            self._request = episode.request(prompt, call.sampling)
        self._place: Place | None = None
        self.id = completion_id(self._request)
        self._header = chunk_header(self.id, call.model)
        self.response = StreamResponse(self, self.id)  # pyright: ignore[reportAttributeAccessIssue] - stands for the HTTP response
        self._deadline = None if call.timeout_s is None else anyio.current_time() + call.timeout_s
        self._ends = episode.renderer.eos_ids | set(call.sampling.stop_token_ids)
        self._ended = False
        self._text = episode.renderer.incremental_decoder()
        thinking = prompt.placed.thinking_open
        self._splitter = DeltaSplitter(tools=prompt.tools, stops=call.sampling.stop, thinking_open=thinking)

    async def __anext__(self) -> ChatCompletionChunk:
        """Return the next chunk.

        Raises:
            ServerError: as `chat.completions.create`.

        Cancellation: the request is aborted and nothing is recorded.
        """
        while not self._ready:
            if self._done:
                raise StopAsyncIteration
            await self._advance()
        return self._ready.popleft()

    def __aiter__(self) -> AsyncIterator[ChatCompletionChunk]:
        """Return the stream itself: there is no generator to be left half-way."""
        return self

    async def close(self) -> None:
        """Leave the stream; unless its last token is in, the request is aborted and nothing is recorded."""
        self._ready.clear()
        self._leave()
        await self._sampling.aclose()

    def _leave(self) -> None:
        self._done = True
        if self._place is not None:
            self._place.close()

    async def _advance(self) -> None:
        try:
            piece = await self._next_piece()
            if piece.generation is None:
                self._emit(self._split(piece.output_ids.tolist()))
                return
            await self._sampling.aclose()
            self._finish(piece.generation)
            self._leave()
        except BaseException as error:
            self._leave()
            await self._sampling.__aexit__(type(error), error, error.__traceback__)
            raise

    async def _next_piece(self) -> GenerationChunk:
        remaining = None if self._deadline is None else max(0.0, self._deadline - anyio.current_time())
        with anyio.move_on_after(remaining):
            if self._chunks is None:
                self._place = Place(self._episode.call())
                self._chunks = await self._sampling.enter_async_context(self._episode.backend.stream(self._request))
                self._ready.append(chunk(self._header, {"role": "assistant", "content": ""}))
            try:
                return await anext(self._chunks)
            except StopAsyncIteration:
                raise ReplyError(f"request {self._request.request_id}: the stream ended without its last chunk") from None
        raise CallTimeout(timed_out(self._episode.id, self._call.timeout_s or 0.0))

    def _split(self, ids: list[int]) -> Delta:
        """Return what new ids settle; an end-of-turn id may or may not be part of the text, so it is left for the end."""
        for at, token_id in enumerate(ids):
            if self._ended or token_id in self._ends:
                self._ended, ids = True, ids[:at]
                break
        return self._splitter.push(self._text.push(ids)) if ids else Delta("", "")

    def _emit(self, delta: Delta) -> None:
        for name, text in (("reasoning_content", delta.reasoning), ("content", delta.content)):
            if text:
                self._ready.append(chunk(self._header, {name: text}))

    def _finish(self, generation: Generation) -> None:
        episode, prompt, thinking = self._episode, self._prompt, self._prompt.placed.thinking_open
        episode.check_whole(self._request, generation)
        parsed = episode.renderer.parse(
            generation.output_ids, tools=prompt.tools, stopped_on=generation.matched_stop, thinking_open=thinking
        )
        rest = self._splitter.rest(parsed.reasoning or "", parsed.content)  # before `record`: a stream that fails is no turn
        message = episode.graph.turns[episode.record(prompt, self._request, generation)].message
        self._emit(rest)
        for index, call in enumerate(message.get("tool_calls") or ()):
            self._ready.append(chunk(self._header, {"tool_calls": [{"index": index, **call}]}))
        extra: dict[str, object] = {"token_ids": generation.output_ids.tolist()}
        if self._call.logprobs:
            extra["logprobs"] = token_logprobs(episode.renderer, generation)
        self._ready.append(chunk(self._header, {}, finish=finish_reason(message, generation), extra=extra))
        if self._call.include_usage:
            self._ready.append(chunk(self._header, None, usage=usage(prompt.context.size, generation)))
