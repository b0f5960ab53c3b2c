"""The OpenAI-compatible client of one episode: chat completions in, recorded turns out.

Invariant: every chat completion goes to the backend of the episode with the arguments as they were given; against the policy
it never goes through HTTP to this process. `close` returns the episode's trajectory once, and nothing can be added to the
episode afterwards.
"""

from __future__ import annotations

import copy
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from functools import cached_property
from typing import Any, Literal, Self, TypeAlias, TypedDict, TypeVar, Unpack, cast, overload

import anyio.lowlevel
from openai import AsyncOpenAI, AsyncStream
from openai.resources.chat import AsyncChat
from openai.resources.chat.completions import AsyncCompletions, AsyncCompletionsWithRawResponse
from openai.types.chat import ChatCompletion, ChatCompletionChunk, ParsedChatCompletion

from agentrl.client.arguments import RAW_RESPONSE_HEADER, CreateArguments, MessageLike, wants_stream
from agentrl.client.backend import AskedCall, ClientBackend, PolicyTokenizer
from agentrl.client.completion import ChatStream, completion
from agentrl.client.door import Door, DoorSettings
from agentrl.client.episode import Episode
from agentrl.client.offline import BASE_URL, not_served, offline_http_client
from agentrl.client.parsed import parsed_completion, response_format_of
from agentrl.errors import AgentRLError, WorkflowError
from agentrl.inference.backend import Generation
from agentrl.support.companions import load_companion
from agentrl.tokens.graph import TokenGraph
from agentrl.types import BranchPath, EpisodeFailure, Int32Array, Message, Speaker, StopReason, Trajectory, Turn

_BOUND_TO_ONE_CLIENT = ("chat", "beta", "with_raw_response", "with_streaming_response")
"""The cached properties of an `AsyncOpenAI` whose values keep a reference to it."""

ParsedT = TypeVar("ParsedT")
Answered: TypeAlias = "ChatCompletion | AsyncStream[ChatCompletionChunk] | RawResponse"


class GenerateArguments(TypedDict, total=False):
    """Sampling arguments of `Client.generate`; None means the run's default.

    Recorded log-probs are of the untruncated distribution: `top_p` below 1, `top_k` and `min_p` above 0 sample from another
    one and bias the behavior weights.
    """

    max_tokens: int | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    frequency_penalty: float | None
    presence_penalty: float | None
    stop: str | Sequence[str] | None
    stop_token_ids: Sequence[int] | None
    ignore_eos: bool | None
    seed: int | None


class Client(AsyncOpenAI):
    """An `AsyncOpenAI` bound to one episode: its model is the policy being trained, an endpoint's, or a record.

    Calls may run in parallel and be retried. Each completed one is a turn of the episode. So is what a call had sampled that
    the agent gives up, by a timeout, a cancelled scope, or a stream that it leaves.

    Args:
        backend: answers the calls, and holds the episode.
    """

    speaker: Speaker = Speaker()
    """The agent that takes the turns of this client's calls."""

    def __init__(self, backend: ClientBackend) -> None:
        connection = backend.connection
        options: dict[str, Any] = {"api_key": "agentrl", "base_url": BASE_URL, "timeout": None, "max_retries": 0}
        if connection is not None:  # for code that looks at the options of an `AsyncOpenAI`
            options |= {"api_key": connection.api_key, "base_url": str(connection.base_url)}
            options |= {"timeout": connection.timeout, "max_retries": connection.max_retries}
        super().__init__(http_client=offline_http_client(), **options)
        self.backend = backend

    @property
    def episode(self) -> Episode:
        """The record of the episode."""
        return self.backend.episode

    @cached_property
    def chat(self) -> Chat:  # pyright: ignore[reportIncompatibleMethodOverride] - openai's own descriptor
        """The chat endpoint; its calls are the episode's turns."""
        return Chat(self)

    async def answer(self, messages: Iterable[MessageLike], stream: bool, arguments: Mapping[str, object]) -> Answered:
        """Return what `chat.completions.create` returns for these messages and its other arguments.

        Text that something other than the model or a limit cut is no answer, and raises.
        """
        call = AskedCall(messages, arguments, self.speaker, self.timeout)
        result = (
            ChatStream(await self.backend.stream(call), self.episode.calls)
            if stream
            else completion(await self.backend.answer(call))
        )
        headers = arguments.get("extra_headers")
        is_raw = isinstance(headers, Mapping) and RAW_RESPONSE_HEADER in headers
        return RawResponse(result, result.id) if is_raw else result

    async def generate(
        self, input_ids: Sequence[int] | Int32Array, *, timeout: float | None = None, **sampling: Unpack[GenerateArguments]
    ) -> Generation:
        """Sample one completion of a whole context, [N] ids, and record it as a turn; aborted output is returned, too.

        The context continues the turn whose context and output it begins with, the longest if there are several; else it
        starts a new root. `timeout` is the deadline in seconds.

        Raises:
            EpisodeLimit: a budget is spent, or the context leaves no room; nothing was sent.
            ServerError: the backend failed, or returned nothing usable.
            WorkflowError: an argument is wrong, an id is outside the vocabulary, or the model takes text only.

        Cancellation: the request is aborted. What was sampled is recorded as a turn, unless the episode ends.
        """
        return await self.backend.generate(input_ids, self.speaker, timeout, sampling)

    @property
    def graph(self) -> TokenGraph:
        """The tokens of the episode's turns so far."""
        return self.backend.graph

    @property
    def tokenizer(self) -> PolicyTokenizer:
        """The tokenizer of the policy, for `generate`."""
        return self.backend.tokenizer

    @property
    def limit_reached(self) -> StopReason | None:
        """The limit that the last call was refused for, caught or not; None if a later call completed."""
        return self.episode.calls.limit_reached

    @property
    def unresolved_error(self) -> AgentRLError | None:
        """The error of the last failed or refused call, caught or not; None if a later call completed."""
        return self.episode.calls.unresolved

    def settle_refusals(self) -> None:
        """Let calls that are refused for what they ask be the policy's doing, those before and those to come.

        Where the policy writes requests of its own, as by a shell beside its agent, a wrong one would else turn a bad reward
        into a failure, from which nothing learns. The metric `refused_calls` counts those so far. A failed server still
        fails the episode.
        """
        if (num_refused := self.episode.calls.settle_refusals()) > 0:
            self.record(refused_calls=num_refused)

    def role(self, name: str) -> Self:
        """Return a client of the same episode whose turns have the role `name`, such as `critic`.

        A role is a label in records and displays; rewards stay those of the whole episode (else use `as_player`).
        """
        if not isinstance(cast("object", name), str) or not name:
            raise WorkflowError(f"client.role takes the name of a role, got {name!r}")
        other = self._twin()
        other.speaker = self.speaker._replace(role=name)
        return other

    def as_player(self, player: str) -> Self:
        """Return a client of the same episode whose turns are those of `player`.

        A turn is credited with the rewards of its player's turns and with the final reward, not with those of others.
        """
        if not isinstance(cast("object", player), str) or not player:
            raise WorkflowError(f"client.as_player takes the name of a player, got {player!r}")
        other = self._twin()
        other.speaker = self.speaker._replace(player=player)
        return other

    def branch(self) -> Self:
        """Return a client of the same episode whose turns stand in a new branch, declared independent of other branches.

        Declared is: no reward of a turn of this branch depends on what the policy does in another branch, and the other way
        round. Turns of two branches share no turn rewards under `advantage: turn`. Nothing checks the promise; where it is
        broken, the estimate is biased. Rewards outside the branches, and the final one, are credited to all of them.
        """
        other = self._twin()
        other.speaker = self.speaker._replace(branch=self.episode.open_branch(self.speaker.branch))
        return other

    def served(self, settings: DoorSettings = DoorSettings()) -> AbstractAsyncContextManager[Door]:  # noqa: B008 - frozen
        """Open a door to this episode over HTTP, on loopback, for programs that speak a model API; needs asyncio.

        Their calls are turns like those of this client, with its role, player and branch. The door's secret ends with the
        block, and so do the calls that still run.
        """
        open_door = cast("Callable[..., AbstractAsyncContextManager[Door]]", load_companion("agentrl.doors", "http"))
        return open_door(self, settings)

    def reward(self, completion: object, value: float | Mapping[str, float]) -> None:
        """Set the reward of one turn, once.

        Args:
            completion: what the call returned (`ChatCompletion`, `Generation`), a chunk of a finished stream, or an id.
            value: a finite number, where bool counts as 0 or 1; or named parts that add up to the reward, such as
                `{"right": 1.0, "length": -0.1}`, which are recorded by name.
        """
        self.episode.reward(completion, value, self.speaker.branch)

    def reward_final(self, value: float | Mapping[str, float]) -> None:
        """Set the final reward of the episode, a number or named parts of it, once; `run` then returns nothing."""
        self.episode.reward_final(value)

    @property
    def turns(self) -> TurnHandles:
        """The turns completed so far: `client.turns[-1].reward(0.5)`; of a role, player or branch, those of its own."""
        return TurnHandles(self.episode, self.speaker)

    def record(self, **metrics: float) -> None:
        """Record numbers about the episode, such as `busy=1`; a later value replaces an earlier one of the same name."""
        self.episode.record_metrics(metrics)

    def final_answer(self, answer: str | float | None) -> None:
        """Name the answer of the episode, for `majority_rate`: the share of tasks whose most frequent answer is right."""
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
        `final_reward` is None where `reward_final` has set one. `failure` says why there is no usable result.

        Raises:
            RewardError: `final_reward` is not a finite number, or there is one; the episode stays open.
        """
        if stop_reason is None:
            return anyio.lowlevel.checkpoint()
        if self.episode.is_open:
            self.backend.finish(failure)
        trajectory = self.episode.close(stop_reason, final_reward, failure)
        # `chat` and the client refer to each other; together they would keep the episode until the garbage collector runs.
        vars(self).pop("chat", None)
        return trajectory

    async def __aexit__(self, *details: object) -> None:
        """Leave the episode open: the code that made the client closes it."""

    async def request(self, cast_to: object, options: Any, **details: Any) -> Any:  # noqa: ANN401
        """Send the request of another API, such as embeddings, over an endpoint's connection; else refuse it."""
        connection = self.backend.connection
        if connection is not None:
            return await connection.request(cast("Any", cast_to), options, **details)
        with self.episode.refusals():
            not_served(f"{options.method.upper()} {options.url}")

    def copy(self, **options: Any) -> Self:  # noqa: ANN401 - pyright: the options of AsyncOpenAI.copy
        """Return a client of the same episode with another `timeout`, in seconds; an endpoint takes other options, too."""
        other = self._twin()
        if self.backend.connection is not None:
            connection = self.backend.connection.copy(**options)
            other.backend = self.backend.over(connection)
            other.base_url, other.timeout = connection.base_url, connection.timeout
            other.max_retries = connection.max_retries
        elif options.get("timeout") is not None:
            other.timeout = options["timeout"]  # whatever it is, the next call checks it
        return other

    with_options = copy

    def _twin(self) -> Self:
        """Return another client of the same episode with the same options."""
        other = copy.copy(self)
        for name in _BOUND_TO_ONE_CLIENT:
            vars(other).pop(name, None)
        return other


class Chat(AsyncChat):
    """`client.chat`."""

    def __init__(self, client: Client) -> None:
        super().__init__(client)
        self._episode_client = client

    @cached_property
    def completions(self) -> Completions:  # pyright: ignore[reportIncompatibleMethodOverride] - openai's own descriptor
        """`client.chat.completions`."""
        return Completions(self._episode_client)


class Completions(AsyncCompletions):
    """`client.chat.completions`."""

    def __init__(self, client: Client) -> None:
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
        """Return the answer to `messages`, recorded as a turn; for `stream=True` a stream, recorded with its last chunk.

        Raises:
            TypeError: an argument the OpenAI API does not have.
            WorkflowError: an argument that is wrong or cannot be honoured, or the episode is closed.
            EpisodeLimit: the turn or token budget is spent, or the context leaves no room; nothing was sent.
            TokenError: the chat template cannot render the messages.
            ServerError: the backend failed, aborted the call, or returned nothing usable; `CallTimeout` after `timeout`.

        Cancellation: the request is aborted. What was sampled is recorded as a turn, unless the episode ends.
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

        An answer that is no such object has `parsed` None and a `refusal` that says why; it raises nothing. The policy
        serves this with `sampling.unsupported: prompt`.
        """
        with self._refusals():
            form = response_format_of(response_format)
        arguments.pop("stream", None)
        answered = await self._answer(messages, False, {**arguments, "response_format": form})
        if not isinstance(answered, ChatCompletion):
            not_served("chat.completions.parse with raw responses")
        return parsed_completion(answered, response_format, arguments.get("tools"))


class RawResponse:
    """The result of `with_raw_response`: the parsed object with the attributes of an HTTP response."""

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


class TurnHandle:
    """A turn of a running episode."""

    __slots__ = ("_branch", "_episode", "index")

    def __init__(self, episode: Episode, index: int, branch: BranchPath) -> None:
        self._episode = episode
        self._branch = branch
        self.index = index
        """Number of the turn in the episode, from 0 in order of completion."""

    @property
    def record(self) -> Turn:
        """The recorded turn: token ids, log-probs, versions."""
        return self._episode.turns[self.index]

    @property
    def message(self) -> Message:
        """The assistant message of the turn."""
        return self.record.message

    @property
    def given_reward(self) -> float | None:
        """The reward of the turn; None until it has one."""
        return self.record.reward

    def reward(self, value: float | Mapping[str, float]) -> None:
        """Set the reward of this turn, a number or named parts of it, once."""
        self._episode.reward_turn(self.index, value, self._branch)

    def __repr__(self) -> str:
        return f"<turn {self.index}: {self.message}>"


class TurnHandles(Sequence[TurnHandle]):
    """The completed turns of an episode, in order; it grows as calls complete."""

    def __init__(self, episode: Episode, speaker: Speaker) -> None:
        self._episode = episode
        self._speaker = speaker

    def _indices(self) -> list[int]:
        role, player, branch, *_ = self._speaker
        turns = enumerate(self._episode.turns)
        named = [(at, turn) for at, turn in turns if role in ("", turn.role) and player in ("", turn.player)]
        return [at for at, turn in named if turn.branch[: len(branch)] == branch]

    def _handle(self, index: int) -> TurnHandle:
        return TurnHandle(self._episode, index, self._speaker.branch)

    def __len__(self) -> int:
        return len(self._indices())

    def __iter__(self) -> Iterator[TurnHandle]:
        return iter([self._handle(index) for index in self._indices()])

    @overload
    def __getitem__(self, index: int) -> TurnHandle: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[TurnHandle]: ...

    def __getitem__(self, index: int | slice) -> TurnHandle | Sequence[TurnHandle]:
        found = self._indices()
        if isinstance(index, slice):
            return [self._handle(at) for at in found[index]]
        try:
            return self._handle(found[index])
        except IndexError:
            raise IndexError(f"episode {self._episode.id} has {len(found)} turns so far, asked for {index}") from None
