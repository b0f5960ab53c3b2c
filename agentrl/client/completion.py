"""The front end for chat completions: turns as `ChatCompletion` and as a stream of `ChatCompletionChunk`.

Invariant: each object has passed the validation of its openai model; its content, reasoning and tool calls are those of the
turn's recorded message. The chunks of a stream add up to what the same call returns without streaming.
"""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import AsyncIterator, Mapping

from openai import AsyncStream
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from agentrl.client.backend import Answer, AnswerStream, Delta, Piece
from agentrl.client.episode import EpisodeCalls
from agentrl.errors import AgentRLError
from agentrl.inference.backend import GenerateRequest, Generation
from agentrl.tokens.renderer import Renderer
from agentrl.types import Message, StopReason


def completion(answer: Answer) -> ChatCompletion:
    """Return the completion of a turn: an endpoint's own, or one that is made of the record.

    Beyond the OpenAI fields the latter carries `choices[0].token_ids` (the sampled ids), `message.reasoning_content` where
    the model reasoned, and `prompt_token_ids` where they were asked for.
    """
    if answer.native is not None:
        return answer.native
    message, generation = answer.message, answer.generation
    choice: dict[str, object] = {
        "finish_reason": finish_reason(message, generation),
        "index": 0,
        "message": message_fields(message),
        "token_ids": generation.output_ids.tolist(),
    }
    if answer.logprobs is not None:
        choice["logprobs"] = answer.logprobs
    fields: dict[str, object] = {
        "id": answer.id,
        "object": "chat.completion",
        "created": int(time.time()),
        "model": answer.model,
        "choices": [choice],
        "usage": usage(answer.num_context, generation),
    }
    if answer.prompt_ids is not None:
        fields["prompt_token_ids"] = answer.prompt_ids.tolist()
    return ChatCompletion.model_validate(fields)


def chunk(
    header: Mapping[str, object],
    delta: Mapping[str, object] | None,
    *,
    finish: str | None = None,
    usage: Mapping[str, object] | None = None,
    extra: Mapping[str, object] | None = None,
) -> ChatCompletionChunk:
    """Return a chunk with one choice, which has `extra`, too; or with none when `delta` is None."""
    choice = {"index": 0, "delta": delta, "finish_reason": finish, **(extra or {})}
    fields: dict[str, object] = {**header, "choices": [] if delta is None else [choice]}
    if usage is not None:
        fields["usage"] = usage
    return ChatCompletionChunk.model_validate(fields)


def message_fields(message: Message) -> dict[str, object]:
    """Return a recorded message as the wire writes it: content None beside tool calls when there is no text."""
    content, calls, reasoning = message.get("content"), message.get("tool_calls"), message.get("reasoning_content")
    fields: dict[str, object] = {"role": "assistant", "content": content or (None if calls else "")}
    if reasoning:
        fields["reasoning_content"] = reasoning
    if calls:
        fields["tool_calls"] = calls
    return fields


def finish_reason(message: Message, generation: Generation) -> str:
    """Return `length` for a truncated output, else `tool_calls` if there are any, else `stop`."""
    if generation.stop_reason is StopReason.LENGTH:
        return "length"
    return "tool_calls" if message.get("tool_calls") else "stop"


def usage(prompt_tokens: int, generation: Generation) -> dict[str, object]:
    """Return the token counts of a call."""
    sampled = len(generation.output_ids)
    counts: dict[str, object] = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": sampled,
        "total_tokens": prompt_tokens + sampled,
    }
    if generation.cached_tokens:
        counts["prompt_tokens_details"] = {"cached_tokens": generation.cached_tokens}
    return counts


def answer_usage(answer: Answer) -> dict[str, object] | None:
    """Return the token counts of an answer; None of an endpoint that reports none."""
    if answer.native is None:
        return usage(answer.num_context, answer.generation)
    return None if answer.native.usage is None else answer.native.usage.model_dump(exclude_unset=True)


def token_logprobs(renderer: Renderer, generation: Generation) -> dict[str, object]:
    """Return one entry for each sampled token; `bytes` is None where a token is not whole UTF-8 by itself."""
    entries: list[dict[str, object]] = []
    for token_id, logprob in zip(generation.output_ids.tolist(), generation.output_logprobs.tolist(), strict=True):
        text = renderer.decode([token_id], skip_special=False)
        data = None if "\ufffd" in text else list(text.encode())
        entries.append({"token": text, "bytes": data, "logprob": logprob, "top_logprobs": [], "token_id": token_id})
    return {"content": entries, "refusal": None}


class ChunkWriter:
    """Writes one answer as chunks; `take` returns those that are new."""

    def __init__(self, identity: str, model: str, *, include_usage: bool) -> None:
        self._header = {"id": identity, "object": "chat.completion.chunk", "created": int(time.time()), "model": model}
        self._include_usage = include_usage
        self._chunks: list[ChatCompletionChunk] = []
        self._has_role = False

    def take(self) -> list[ChatCompletionChunk]:
        """Return the chunks since the last call."""
        chunks, self._chunks = self._chunks, []
        return chunks

    def write(self, delta: Delta) -> None:
        """Write new text."""
        self._write_role()
        for name, text in (("reasoning_content", delta.reasoning), ("content", delta.content)):
            if text:
                self._chunks.append(chunk(self._header, {name: text}))

    def write_end(self, answer: Answer) -> None:
        """Write what follows the text: tool calls, the reason of the end, and the usage."""
        self._write_role()
        message, generation = answer.message, answer.generation
        for index, call in enumerate(message.get("tool_calls") or ()):
            self._chunks.append(chunk(self._header, {"tool_calls": [{"index": index, **call}]}))
        extra: dict[str, object] = {"token_ids": generation.output_ids.tolist()}
        if answer.logprobs is not None:
            extra["logprobs"] = answer.logprobs
        self._chunks.append(chunk(self._header, {}, finish=finish_reason(message, generation), extra=extra))
        if self._include_usage and (counts := answer_usage(answer)) is not None:
            self._chunks.append(chunk(self._header, None, usage=counts))

    def _write_role(self) -> None:
        if not self._has_role:
            self._has_role = True
            self._chunks.append(chunk(self._header, {"role": "assistant", "content": ""}))


class ChatStream(AsyncStream[ChatCompletionChunk]):
    """The chunks of one call; iterate it in one task, and leave it early with `async with` or `close()`.

    Log-probs, where asked for, and the sampled ids (`choices[0].token_ids`) come with the chunk that has the
    `finish_reason`. The turn is recorded when that chunk comes. Of a stream that is left before, what came is recorded: at
    once by `close`, else before the next call, or the end of the episode.
    """

    def __init__(self, answer: AnswerStream, calls: EpisodeCalls) -> None:
        # AsyncStream.__init__ would read a response; there is none.
        self.id = answer.id
        self.response = answer.response or _StreamResponse(self)  # pyright: ignore[reportAttributeAccessIssue] - stands for one
        self._answer = answer
        self._calls = calls
        self._written = ChunkWriter(answer.id, answer.model, include_usage=answer.include_usage)
        self._ready: deque[ChatCompletionChunk] = deque()
        self._done = False

    async def __anext__(self) -> ChatCompletionChunk:
        """Return the next chunk.

        Cancellation: the request is aborted. What came is recorded as a turn, unless the episode ends.
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
        """Leave the stream; unless its last token is in, the request is aborted, and what came is recorded as a turn."""
        self._ready.clear()
        self._leave()
        await self._answer.close()

    def __del__(self) -> None:
        """End the running call of a stream that is just left; its episode closes it."""
        self._leave()

    def _leave(self) -> None:
        self._done = True
        if self._answer.running is not None:
            self._answer.running.close()

    async def _advance(self) -> None:
        try:
            for piece in await self._answer.next():
                self._write(piece)
        except BaseException as error:
            self._leave()
            try:
                await self._answer.close(error)
            finally:
                if isinstance(error, AgentRLError):
                    self._calls.fail(error)
            raise

    def _write(self, piece: Piece) -> None:
        if isinstance(piece, ChatCompletionChunk):
            self._ready.append(piece)
            return
        if isinstance(piece, Answer) and piece.native is not None:  # its chunks have come
            self._leave()
            return
        if isinstance(piece, Delta):
            self._written.write(piece)
        else:
            self._written.write_end(piece)
        self._ready.extend(self._written.take())
        if isinstance(piece, Answer):
            self._leave()


class _StreamResponse:
    """The part of an HTTP response that users of `AsyncStream.response` need: headers, and closing."""

    status_code = 200

    def __init__(self, stream: ChatStream) -> None:
        # No reference cycle: a stream without references must go at once, and end its running call.
        self._stream = weakref.ref(stream)
        self.headers: Mapping[str, str] = {"content-type": "text/event-stream", "x-request-id": stream.id}

    async def aclose(self) -> None:
        """Close the stream."""
        stream = self._stream()
        if stream is not None:
            await stream.close()


def completion_id(request: GenerateRequest) -> str:
    """Return the completion id of a request, unique over all episodes."""
    return f"chatcmpl-{request.request_id}"
