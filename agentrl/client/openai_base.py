"""The part of `AsyncOpenAI` that an episode's client inherits and does not use: one shared, refusing HTTP client.

Invariant: an episode's client never opens a connection; every endpoint but chat completions raises an error that names
what is served.

`client.chat.completions` of an episode's client, whoever answers.

Invariant: every call of `create` goes to the client's `answer` with the arguments as they were given.

What the clients of an episode have in common, whoever samples: rewards, metrics, closing.

Invariant: one episode, one trajectory: `close` returns it once, and nothing can be added to it afterwards.
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Iterable, Mapping
from functools import cached_property
from typing import Any, Literal, NoReturn, Protocol, TypeAlias, Unpack, overload

import anyio.lowlevel
import openai
from openai import AsyncOpenAI, AsyncStream
from openai.resources.chat import AsyncChat
from openai.resources.chat.completions import AsyncCompletions
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from agentrl.client.arguments import CreateArguments, MessageLike, streams
from agentrl.client.budget import Ledger
from agentrl.errors import ServerTimeout, WorkflowError
from agentrl.types import EpisodeFailure, StopReason, Trajectory


class EpisodeRecord(Protocol):
    """The part of an episode that `EpisodeClient` needs."""

    @property
    def ledger(self) -> Ledger:
        """Budgets, rewards and metrics."""
        ...

    def reward(self, target: object, value: object) -> None:
        """Set a turn's reward."""
        ...

    def close(self, stop_reason: StopReason, final_reward: float | None, failure: EpisodeFailure | None) -> Trajectory:
        """End the episode."""
        ...


class EpisodeClient(AsyncOpenAI):
    """An `AsyncOpenAI` bound to one episode: `Client` in training, `EndpointClient` in evaluation."""

    _record: EpisodeRecord

    @property
    def limit_reached(self) -> StopReason | None:
        """TURN_LIMIT or TOKEN_LIMIT once a call has been refused for it, even if the workflow caught the error."""
        return self._record.ledger.limit

    def reward(self, completion: object, value: float) -> None:
        """Set the reward of one turn, once.

        Args:
            completion: what the call returned (`ChatCompletion`, `Generation`), a chunk of a finished stream, or the
                completion's id.
            value: a finite number; bool counts as 0 or 1.

        Raises:
            RewardError: `value` is not a finite number, or the turn already has a reward.
            WorkflowError: `completion` is not of this episode, or the episode is closed.
        """
        self._record.reward(completion, value)

    def record(self, **metrics: float) -> None:
        """Record numbers about the episode, such as `busy=1`; the last value of a name counts.

        Raises:
            WorkflowError: a value is not a finite number, or the episode is closed.
        """
        self._record.ledger.record(metrics)

    @overload
    def close(self) -> Awaitable[None]: ...

    @overload
    def close(
        self, stop_reason: StopReason, final_reward: float | None = None, failure: EpisodeFailure | None = None
    ) -> Trajectory: ...

    def close(  # pyright: ignore[reportIncompatibleMethodOverride] - the base ends connections, of which an episode has none
        self, stop_reason: StopReason | None = None, final_reward: float | None = None, failure: EpisodeFailure | None = None
    ) -> Trajectory | Awaitable[None]:
        """End the episode and return its trajectory; later calls on this client raise `WorkflowError`.

        Without arguments it is `AsyncOpenAI.close`, for agents that close what they were given: it does nothing.

        Args:
            stop_reason: why the episode ended.
            final_reward: credited to the whole episode.
            failure: why there is no usable result.

        Raises:
            RewardError: `final_reward` is not a finite number; the episode stays open.
            WorkflowError: the episode is closed already.
        """
        if stop_reason is None:
            return anyio.lowlevel.checkpoint()
        return self._record.close(stop_reason, final_reward, failure)

    async def __aexit__(self, *details: object) -> None:
        """Leave the episode open: whoever made the client closes it."""


BASE_URL = "http://agentrl.invalid/v1"
SERVED = "an episode's client serves chat.completions.create (also stream=True and with_raw_response) and generate"


class CallTimeout(ServerTimeout, openai.APITimeoutError):
    """The deadline a model call was given as `timeout` has passed; the call recorded nothing.

    It is an `openai.APITimeoutError` too, so agents written for the OpenAI API can catch and retry it.
    """

    def __init__(self, message: str, *, status: int | None = None, url: str | None = None) -> None:
        ServerTimeout.__init__(self, message, status=status, url=url)
        self.message = message
        self.request = _http_client().build_request("POST", f"{BASE_URL}/chat/completions")
        self.body, self.code, self.param, self.type = None, None, None, None


def timed_out(episode_id: str, timeout_s: float) -> str:
    """Return the message of a `CallTimeout`."""
    return f"episode {episode_id}: no completion within the call's timeout of {timeout_s:g} s"


def refuse(what: str) -> NoReturn:
    """Raise `WorkflowError`, saying that `what` is not served and what is."""
    raise WorkflowError(f"{what} is not served; {SERVED}")


class _RefusingTransport:
    """Stands where a connection pool would; reached only by code that goes around the client."""

    async def handle_async_request(self, request: object) -> NoReturn:
        refuse(f"{request!r}")

    async def aclose(self) -> None: ...

    async def __aenter__(self) -> _RefusingTransport:
        return self

    async def __aexit__(self, *details: object) -> None: ...


@functools.cache
def _http_client() -> Any:  # noqa: ANN401 - an httpx or httpx2 client, by the openai version
    transport: Any = _RefusingTransport()
    return openai.DefaultAsyncHttpxClient(transport=transport, trust_env=False)


@functools.cache
def shared_attributes() -> Mapping[str, object]:
    """Return the attributes a fresh `AsyncOpenAI` has: a client that copies them is one, at no cost per episode."""
    client = AsyncOpenAI(api_key="agentrl", base_url=BASE_URL, max_retries=0, timeout=None, http_client=_http_client())
    return dict(vars(client))


class RawResponse:
    """What `with_raw_response` returns: the parsed object behind an HTTP-like face."""

    status_code = 200
    retries_taken = 0

    def __init__(self, parsed: object, request_id: str) -> None:
        self._parsed = parsed
        self.request_id = request_id
        self.headers: dict[str, str] = {"content-type": "application/json", "x-request-id": request_id}

    def parse(self, *, to: type | None = None) -> Any:  # noqa: ANN401 - mirrors the openai class
        """Return the completion or stream."""
        if to is not None and not isinstance(self._parsed, to):
            refuse(f"parse(to={to.__name__})")
        return self._parsed


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
