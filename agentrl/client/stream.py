"""A model call as a stream of `ChatCompletionChunk`.

Invariant: the chunks add up to what the same call returns without streaming. The turn is recorded when the last token has
arrived; a stream that is left before that records nothing.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from enum import Enum, auto
from typing import NamedTuple

import anyio
from openai import AsyncStream
from openai.types.chat import ChatCompletionChunk

from agentrl.client.arguments import CallArguments
from agentrl.client.calls import RunningCall
from agentrl.client.completion import chunk, chunk_header, finish_reason, token_logprobs, usage
from agentrl.client.episode import Episode, completion_id
from agentrl.client.openai_base import call_timeout
from agentrl.errors import AgentRLError, ReplyError, TokenError
from agentrl.inference.backend import Generation, GenerationChunk
from agentrl.types import Message, Speaker

_OPEN, _CLOSE = "<think>", "</think>"
_CALL_MARKERS = ("<tool_call>", "[TOOL_CALLS]")
_CALL_TAG = "<|python_tag|>"
"""A call in this format is the whole message, with or without the tag."""


class Delta(NamedTuple):
    """New text; empty where there is none."""

    reasoning: str
    content: str


class _At(Enum):
    START = auto()
    REASONING_START = auto()
    REASONING = auto()
    CONTENT_GAP = auto()
    CONTENT_START = auto()
    CONTENT = auto()
    HELD = auto()


class DeltaSplitter:
    r"""Splits one streamed output into reasoning and content while it grows.

    The text handed out so far is always a prefix of what the parsed message will hold. So text is kept back while its
    meaning is open: a marker or stop string that may have begun, white space that may be trimmed, bytes that may yet become
    a character, and everything from the first tool call on.

    Example:
        >>> splitter = DeltaSplitter(tools=True, stops=(), thinking_open=False)
        >>> [splitter.push(text) for text in ("<thi", "nk>Two", "</think>\n\nIt is <to", "ol_call>{}")]
        [Delta(reasoning='', content=''), Delta(reasoning='Two', content=''), Delta(reasoning='', content='It is'),
         Delta(reasoning='', content='')]
        >>> splitter.rest("Two", "It is")
        Delta(reasoning='', content='')
    """

    def __init__(self, *, tools: bool, stops: Iterable[str], thinking_open: bool) -> None:
        self._tools = tools
        self._stops = (*stops, "\ufffd")
        self._thinking_open = thinking_open
        self._at = _At.START
        self._gate = ""
        self._stopped = False
        self._pending = ""
        self._sent_reasoning: list[str] = []
        self._sent_content: list[str] = []

    def push(self, text: str) -> Delta:
        """Return what `text` settles."""
        if self._stopped:
            return Delta("", "")
        self._gate += text
        cut, self._stopped = _first_marker(self._gate, self._stops)
        self._pending += self._gate[:cut]
        self._gate = self._gate[cut:]
        reasoning, content = len(self._sent_reasoning), len(self._sent_content)
        while self._advance():
            pass
        return Delta("".join(self._sent_reasoning[reasoning:]), "".join(self._sent_content[content:]))

    def rest(self, reasoning: str, content: str) -> Delta:
        """Return what is still missing of the finished message.

        Raises:
            TokenError: what was handed out is no prefix of it.
        """
        missing: list[str] = []
        for name, final, sent in (("reasoning", reasoning, self._sent_reasoning), ("content", content, self._sent_content)):
            before = "".join(sent)
            if not final.startswith(before):
                raise TokenError(f"streamed {name} {before[-80:]!r} is not how the parsed message begins: {final[:80]!r}")
            missing.append(final[len(before) :])
        return Delta(*missing)

    def _advance(self) -> bool:
        """Consume pending text up to the next change of place; return whether there was one."""
        place = self._at
        match place:
            case _At.START:
                self._start()
            case _At.REASONING_START:
                self._skip_newlines(_At.REASONING)
            case _At.REASONING:
                self._reasoning()
            case _At.CONTENT_GAP:
                self._skip_newlines(_At.CONTENT_START)
            case _At.CONTENT_START:
                self._content_start()
            case _At.CONTENT:
                self._content()
            case _At.HELD:
                self._pending = ""
        return self._at is not place

    def _start(self) -> None:
        text = self._pending.lstrip()
        if len(text) < len(_OPEN) and _OPEN.startswith(text):
            return
        if text.startswith(_OPEN):
            self._pending = text.removeprefix(_OPEN)
            self._at = _At.REASONING_START
        elif self._thinking_open:
            self._pending = text
            self._at = _At.REASONING_START
        else:
            self._at = _At.CONTENT_START

    def _skip_newlines(self, then: _At) -> None:
        self._pending = self._pending.lstrip("\n")
        if self._pending:
            self._at = then

    def _reasoning(self) -> None:
        cut, closed = _first_marker(self._pending, (_CLOSE,))
        text = self._pending[:cut].rstrip("\n")
        self._sent_reasoning.append(text)
        self._pending = self._pending[cut + len(_CLOSE) :] if closed else self._pending[len(text) :]
        if closed:
            self._at = _At.CONTENT_GAP

    def _content_start(self) -> None:
        text = self._pending
        if not text:
            return
        if not self._tools:
            self._at = _At.CONTENT
        elif text[0].isspace() or text[0] == "{" or text.startswith(_CALL_TAG):
            self._at = _At.HELD
        elif not _CALL_TAG.startswith(text):
            self._at = _At.CONTENT

    def _content(self) -> None:
        cut, found = _first_marker(self._pending, _CALL_MARKERS) if self._tools else (len(self._pending), False)
        text = self._pending[:cut].rstrip()
        self._sent_content.append(text)
        self._pending = self._pending[len(text) :]
        if found:
            self._at = _At.HELD


def _first_marker(text: str, markers: Sequence[str]) -> tuple[int, bool]:
    """Return where the first marker in `text`, whole or begun at its end, starts, and whether it is whole."""
    found = [at for marker in markers if (at := text.find(marker)) >= 0]
    if found:
        return min(found), True
    begun = (length for marker in markers for length in range(1, len(marker)) if text.endswith(marker[:length]))
    return len(text) - max(begun, default=0), False


class StreamResponse:
    """The part of an HTTP response that users of `AsyncStream.response` need: headers, and closing."""

    status_code = 200

    def __init__(self, stream: ChatStream, request_id: str) -> None:
        # No reference cycle: a stream without references must go at once, and end its running call.
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

    def __init__(self, episode: Episode, messages: Sequence[Message], call: CallArguments, *, speaker: Speaker) -> None:
        # AsyncStream.__init__ would read a response; there is none.
        self._episode = episode
        self._speaker = speaker
        self._call = call
        self._messages = messages
        self._ready: deque[ChatCompletionChunk] = deque()
        self._done = False
        self._sampling = AsyncExitStack()
        self._chunks: AsyncIterator[GenerationChunk] | None = None
        with episode.start_call():
            self._prompt = prompt = episode.prepare(messages, call.tools, call.demand, speaker.branch)
            self._request = episode.request(prompt, call.sampling)
        self._running: RunningCall | None = None
        self.id = completion_id(self._request)
        self._header = chunk_header(self.id, call.model)
        self.response = StreamResponse(self, self.id)  # pyright: ignore[reportAttributeAccessIssue] - stands for the HTTP response
        self._deadline = None if call.timeout_s is None else anyio.current_time() + call.timeout_s
        self._ends = episode.renderer.eos_ids | set(call.sampling.stop_token_ids)
        self._ended = False
        self._text = episode.renderer.incremental_decoder()
        thinking = prompt.extension.thinking_open
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
        if self._running is not None:
            self._running.close()

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
            if isinstance(error, AgentRLError):
                self._episode.calls.fail(error)
            await self._sampling.__aexit__(type(error), error, error.__traceback__)
            raise

    async def _next_piece(self) -> GenerationChunk:
        remaining = None if self._deadline is None else max(0.0, self._deadline - anyio.current_time())
        with anyio.move_on_after(remaining):
            if self._chunks is None:
                self._running = self._episode.start_call()
                self._chunks = await self._sampling.enter_async_context(self._episode.backend.stream(self._request))
                self._ready.append(chunk(self._header, {"role": "assistant", "content": ""}))
            try:
                return await anext(self._chunks)
            except StopAsyncIteration:
                raise ReplyError(f"request {self._request.request_id}: the stream ended without its last chunk") from None
        raise call_timeout(self._episode.id, self._call.timeout_s or 0.0)

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
        episode, prompt, thinking = self._episode, self._prompt, self._prompt.extension.thinking_open
        episode.check_not_aborted(self._request, generation)
        parsed = episode.renderer.parse(
            generation.output_ids, tools=prompt.tools, stopped_on=generation.matched_stop, thinking_open=thinking
        )
        rest = self._splitter.rest(parsed.reasoning or "", parsed.content)  # before `record`: a stream that fails is no turn
        message = episode.record(prompt, self._request, generation, speaker=self._speaker).message
        episode.compare(self._messages, self._call.demand, message)
        if self._running is not None:
            self._running.complete()
        self._emit(rest)
        for index, call in enumerate(message.get("tool_calls") or ()):
            self._ready.append(chunk(self._header, {"tool_calls": [{"index": index, **call}]}))
        extra: dict[str, object] = {"token_ids": generation.output_ids.tolist()}
        if self._call.logprobs:
            extra["logprobs"] = token_logprobs(episode.renderer, generation)
        self._ready.append(chunk(self._header, {}, finish=finish_reason(message, generation), extra=extra))
        if self._call.include_usage:
            self._ready.append(chunk(self._header, None, usage=usage(prompt.context.size, generation)))
