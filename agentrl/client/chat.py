"""`client.chat.completions` of an episode's client, whoever answers.

Invariant: every call of `create` goes to the client's `answer` with the arguments as they were given.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from functools import cached_property
from typing import Literal, NoReturn, TypeAlias, Unpack, overload

from openai import AsyncOpenAI, AsyncStream
from openai.resources.chat import AsyncChat
from openai.resources.chat.completions import AsyncCompletions
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from agentrl.client.arguments import CreateArguments, streams
from agentrl.client.messages import MessageLike
from agentrl.client.surface import RawResponse, refuse

Answered: TypeAlias = "ChatCompletion | AsyncStream[ChatCompletionChunk] | RawResponse"
Answer: TypeAlias = Callable[[Iterable[MessageLike], bool, Mapping[str, object]], Awaitable[Answered]]
"""Takes the messages, whether to stream, and the other arguments; returns what `create` returns."""


class Chat(AsyncChat):
    """`client.chat`."""

    def __init__(self, client: AsyncOpenAI, answer: Answer) -> None:
        super().__init__(client)
        self._answer = answer

    @cached_property
    def completions(self) -> Completions:  # pyright: ignore[reportIncompatibleMethodOverride] - openai's own descriptor
        """`client.chat.completions`."""
        return Completions(self._client, self._answer)


class Completions(AsyncCompletions):
    """`client.chat.completions`."""

    def __init__(self, client: AsyncOpenAI, answer: Answer) -> None:
        super().__init__(client)
        self._answer = answer

    @overload
    async def create(
        self, *, messages: Iterable[MessageLike], stream: Literal[False] | None = None, **arguments: Unpack[CreateArguments]
    ) -> ChatCompletion: ...

    @overload
    async def create(
        self, *, messages: Iterable[MessageLike], stream: Literal[True], **arguments: Unpack[CreateArguments]
    ) -> AsyncStream[ChatCompletionChunk]: ...

    async def create(  # pyright: ignore[reportIncompatibleMethodOverride] - the same call, with one list of arguments
        self, *, messages: Iterable[MessageLike], stream: object = None, **arguments: Unpack[CreateArguments]
    ) -> Answered:
        """Return the answer to `messages`, and record it as a turn of the episode.

        Takes what the OpenAI API takes; see `CreateArguments` and `answer` of the client.

        Returns:
            A `ChatCompletion`; a stream of chunks for `stream=True`, whose turn is recorded with its last chunk.

        Raises:
            TypeError: an argument the OpenAI API does not have.
            WorkflowError: an argument that is wrong or cannot be honoured, or the episode is closed.
            EpisodeLimit: the turn or token budget is spent, or the context leaves no room; nothing was sent.
            TokenError: the chat template cannot render the messages.
            ServerError: the backend failed, aborted the call, or returned nothing usable; `CallTimeout` after `timeout`.

        Cancellation: the request is aborted and nothing is recorded.
        """
        return await self._answer(messages, stream is not None and (stream is True or streams(stream)), arguments)

    async def parse(self, **arguments: object) -> NoReturn:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Refuse: structured output needs constrained decoding."""
        refuse("chat.completions.parse (structured output)")
