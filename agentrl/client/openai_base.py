"""The `AsyncOpenAI` that an episode's clients share: one episode, no connection, chat completions only.

Invariant: every chat completion goes to the client's `answer` with the arguments as they were given. `close` returns the
episode's trajectory once, and nothing can be added to the episode afterwards.
"""

from __future__ import annotations

import copy
import functools
from abc import abstractmethod
from collections.abc import Awaitable, Iterable, Mapping
from functools import cached_property
from typing import Any, Generic, Literal, NoReturn, Self, TypeAlias, TypeVar, Unpack, cast, overload

import anyio.lowlevel
import openai
from openai import AsyncOpenAI, AsyncStream
from openai.resources.chat import AsyncChat
from openai.resources.chat.completions import AsyncCompletions, AsyncCompletionsWithRawResponse
from openai.types.chat import ChatCompletion, ChatCompletionChunk, ParsedChatCompletion

from agentrl.client.arguments import CreateArguments, MessageLike, wants_stream
from agentrl.client.episode import EpisodeRecord
from agentrl.client.structured.parsed import parsed_completion, response_format_of
from agentrl.client.turns import TurnHandles
from agentrl.errors import AgentRLError, ServerTimeout, WorkflowError
from agentrl.types import EpisodeFailure, Speaker, StopReason, Trajectory

BASE_URL = "http://agentrl.invalid/v1"
_SERVED = "an episode's client serves chat.completions.create (also stream=True and with_raw_response), parse and generate"
_BOUND_TO_ONE_CLIENT = ("chat", "beta", "with_raw_response", "with_streaming_response")
"""The cached properties of an `AsyncOpenAI` whose values keep a reference to it."""

EpisodeT = TypeVar("EpisodeT", bound=EpisodeRecord)
ParsedT = TypeVar("ParsedT")
Answered: TypeAlias = "ChatCompletion | AsyncStream[ChatCompletionChunk] | RawResponse"


class EpisodeClient(AsyncOpenAI, Generic[EpisodeT]):
    """An `AsyncOpenAI` bound to one episode: `Client` in training, `EndpointClient` in evaluation."""

    episode: EpisodeT
    speaker: Speaker = Speaker()
    """Who takes the turns of this client's calls."""

    def __init__(
        self,
        episode: EpisodeT,
        *,
        api_key: str = "agentrl",
        base_url: str = BASE_URL,
        timeout: object = None,
        max_retries: int = 0,
    ) -> None:
        """Bind a client to `episode`; the options are what code that looks at an `AsyncOpenAI` finds."""
        options: dict[str, Any] = {"timeout": timeout, "max_retries": max_retries}
        super().__init__(api_key=api_key, base_url=base_url, http_client=_http_client(), **options)
        self.episode = episode

    @cached_property
    def chat(self) -> Chat:  # pyright: ignore[reportIncompatibleMethodOverride] - openai's own descriptor
        """The chat endpoint; its calls are the episode's turns."""
        return Chat(self)

    @abstractmethod
    async def answer(self, messages: Iterable[MessageLike], stream: bool, arguments: Mapping[str, Any]) -> Answered:
        """Return what `chat.completions.create` returns for these messages and its other arguments."""

    @property
    def limit_reached(self) -> StopReason | None:
        """The limit that the last call was refused for, caught or not; None if a later call completed."""
        return self.episode.calls.limit_reached

    @property
    def unresolved_error(self) -> AgentRLError | None:
        """The error of the last failed or refused call, caught or not; None if a later call completed."""
        return self.episode.calls.unresolved

    def role(self, name: str) -> Self:
        """Return a client of the same episode whose turns have the role `name`, such as `critic`.

        A role is a label: it tells the turns apart in records and displays, and rewards stay those of the whole episode.
        What plays against the others needs returns of its own, and is a player (`as_player`).

        Raises:
            WorkflowError: `name` is no text, or empty.
        """
        if not isinstance(cast("object", name), str) or not name:
            raise WorkflowError(f"client.role takes the name of a role, got {name!r}")
        other = self._twin()
        other.speaker = self.speaker._replace(role=name)
        return other

    def as_player(self, player: str) -> Self:
        """Return a client of the same episode whose turns are those of `player`.

        Players have returns of their own: a turn is credited with the rewards of its player's turns and with the final
        reward, and not with what other players get.

        Raises:
            WorkflowError: `player` is no text, or empty.
        """
        if not isinstance(cast("object", player), str) or not player:
            raise WorkflowError(f"client.as_player takes the name of a player, got {player!r}")
        other = self._twin()
        other.speaker = self.speaker._replace(player=player)
        return other

    def branch(self) -> Self:
        """Return a client of the same episode whose turns stand in a new branch, declared independent of other branches.

        Declared is: no reward of a turn of this branch depends on what the policy does in another branch, and the other way
        round. Turns of two branches then share no turn rewards under `advantage: turn`, which takes the noise of the one
        out of the other. Nothing checks the promise; where it is broken, the estimate is biased. The rewards of the turns
        outside the branches, and the final reward, are credited to the turns of all of them. Branches may be opened inside
        branches. They share the budgets of the episode.
        """
        other = self._twin()
        other.speaker = self.speaker._replace(branch=self.episode.open_branch(self.speaker.branch))
        return other

    def reward(self, completion: object, value: float | Mapping[str, float]) -> None:
        """Set the reward of one turn, once.

        Args:
            completion: what the call returned (`ChatCompletion`, `Generation`), a chunk of a finished stream, or the
                completion's id.
            value: a finite number, where bool counts as 0 or 1; or named parts that add up to the reward, such as
                `{"right": 1.0, "length": -0.1}`, which are recorded by name.

        Raises:
            RewardError: `value` is not a finite number, or the turn already has a reward.
            WorkflowError: `completion` is not of this episode, or of a declared branch (`branch`) that this client is not
                in, or the episode is closed.
        """
        self.episode.reward(completion, value, self.speaker.branch)

    def reward_final(self, value: float | Mapping[str, float]) -> None:
        """Set the final reward of the episode, a number or named parts of it, once; `run` then returns nothing.

        Raises:
            RewardError: `value` is not a finite number, or there is a final reward already.
            WorkflowError: the episode is closed.
        """
        self.episode.reward_final(value)

    @property
    def turns(self) -> TurnHandles:
        """The turns completed so far: `client.turns[-1].reward(0.5)`; of a role, player or branch, those of its own."""
        return TurnHandles(self.episode, self.speaker)

    def record(self, **metrics: float) -> None:
        """Record numbers about the episode, such as `busy=1`; a later value replaces an earlier one of the same name.

        Raises:
            WorkflowError: a value is not a finite number, or the episode is closed.
        """
        self.episode.record_metrics(metrics)

    def final_answer(self, answer: str | float | None) -> None:
        """Name the answer of the episode, so that the answers of several episodes of a task can be compared.

        `majority_rate` is the share of tasks whose most frequent answer is right. A later answer replaces an earlier one.

        Raises:
            WorkflowError: `answer` is neither text nor a number nor None, or the episode is closed.
        """
        self.episode.name_answer(answer)

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

        Without arguments it is `AsyncOpenAI.close`, for agents that close the client they were given: it does nothing.

        Args:
            stop_reason: why the episode ended.
            final_reward: credited to the whole episode; None where `reward_final` has set it.
            failure: why there is no usable result.

        Raises:
            RewardError: `final_reward` is not a finite number, or `reward_final` has set one; the episode stays open.
            WorkflowError: the episode is closed already.
        """
        if stop_reason is None:
            return anyio.lowlevel.checkpoint()
        trajectory = self.episode.close(stop_reason, final_reward, failure)
        # `chat` and the client refer to each other; together they would keep the episode until the garbage collector runs.
        vars(self).pop("chat", None)
        return trajectory

    async def __aexit__(self, *details: object) -> None:
        """Leave the episode open: the code that made the client closes it."""

    async def request(self, cast_to: object, options: Any, **details: object) -> Any:  # noqa: ANN401
        """Refuse an endpoint that is not served."""
        with self.episode.refusals():
            not_served(f"{options.method.upper()} {options.url}")

    def _twin(self) -> Self:
        """Return another client of the same episode with the same options."""
        other = copy.copy(self)
        for name in _BOUND_TO_ONE_CLIENT:
            vars(other).pop(name, None)
        return other


class Chat(AsyncChat):
    """`client.chat`."""

    def __init__(self, client: EpisodeClient[Any]) -> None:
        super().__init__(client)
        self._episode_client = client

    @cached_property
    def completions(self) -> Completions:  # pyright: ignore[reportIncompatibleMethodOverride] - openai's own descriptor
        """`client.chat.completions`."""
        return Completions(self._episode_client)


class Completions(AsyncCompletions):
    """`client.chat.completions`."""

    def __init__(self, client: EpisodeClient[Any]) -> None:
        super().__init__(client)
        self._answer = client.answer
        self._refusals = client.episode.refusals

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

        The arguments are those of the OpenAI API, as `CreateArguments` lists them.

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
        return await self._answer(messages, wants_stream(stream), arguments)

    @property
    def with_raw_response(self) -> AsyncCompletionsWithRawResponse:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The same calls, which return a `RawResponse`; not cached, as it and this object would refer to each other."""
        return AsyncCompletionsWithRawResponse(self)

    async def parse(  # pyright: ignore[reportIncompatibleMethodOverride] - the same call, with one list of arguments
        self,
        *,
        messages: Iterable[MessageLike],
        response_format: type[ParsedT] | None = None,
        **arguments: Any,  # noqa: ANN401
    ) -> ParsedChatCompletion[ParsedT]:
        """Return the answer to `messages` as an object of the pydantic model `response_format`, in `message.parsed`.

        An answer that is no such object has `parsed` None and a `refusal` that says why; it raises nothing. The client of a
        training run serves this with `sampling.unsupported: prompt`.

        Raises:
            WorkflowError: the run refuses structured output, or an argument is wrong.
            AgentRLError: as `create`.

        Cancellation: the request is aborted and nothing is recorded.
        """
        with self._refusals():
            form = response_format_of(response_format)
        arguments.pop("stream", None)
        completion = await self._answer(messages, False, {**arguments, "response_format": form})
        if not isinstance(completion, ChatCompletion):
            not_served("chat.completions.parse with raw responses")
        return parsed_completion(completion, response_format, arguments.get("tools"))


class RawResponse:
    """What `with_raw_response` returns: the parsed object with the attributes of an HTTP response."""

    status_code = 200
    retries_taken = 0

    def __init__(self, parsed: object, request_id: str) -> None:
        self._parsed = parsed
        self.request_id = request_id
        self.headers: dict[str, str] = {"content-type": "application/json", "x-request-id": request_id}

    def parse(self, *, to: type | None = None) -> Any:  # noqa: ANN401 - mirrors the openai class
        """Return the completion or stream."""
        if to is not None and not isinstance(self._parsed, to):
            not_served(f"parse(to={to.__name__})")
        return self._parsed


class CallTimeout(ServerTimeout, openai.APITimeoutError):
    """The deadline that a model call was given as `timeout` has passed; the call recorded nothing.

    It is an `openai.APITimeoutError` too, so agents written for the OpenAI API can catch and retry it.
    """

    def __init__(self, message: str, *, status: int | None = None, url: str | None = None) -> None:
        ServerTimeout.__init__(self, message, status=status, url=url)
        self.message = message
        self.request = _http_client().build_request("POST", f"{BASE_URL}/chat/completions")
        self.body, self.code, self.param, self.type = None, None, None, None


def call_timeout(episode_id: str, timeout_s: float) -> CallTimeout:
    """Return the error of a call whose `timeout` has passed."""
    return CallTimeout(f"episode {episode_id}: no completion within the call's timeout of {timeout_s:g} s")


def not_served(what: str) -> NoReturn:
    """Raise `WorkflowError`: `what` is not served; the message names what is."""
    raise WorkflowError(f"{what} is not served; {_SERVED}")


class _RefusingTransport:
    """Stands where a connection pool would; only code that bypasses the client reaches it."""

    async def handle_async_request(self, request: object) -> NoReturn:
        not_served(f"{request!r}")

    async def aclose(self) -> None: ...

    async def __aenter__(self) -> _RefusingTransport:
        return self

    async def __aexit__(self, *details: object) -> None: ...


@functools.cache
def _http_client() -> Any:  # noqa: ANN401 - an httpx or httpx2 client, by the openai version
    """Return the HTTP client of all episodes; it has no connections."""
    transport: Any = _RefusingTransport()
    return openai.DefaultAsyncHttpxClient(transport=transport, trust_env=False)
