"""The client workflows get under `agentrl eval`: any OpenAI-compatible endpoint, with rewards but no tokens.

Invariant: the requests are the openai client's own; a trajectory made here has one turn for each completed call, in order
of completion, with messages and rewards and without token ids, so nothing of it can be trained. A reply that is not whole
(no finish_reason, nothing sampled, not a completion) is a `ReplyError` and no turn. A token budget counts what the endpoint
says it sampled; one that does not say is a `ReplyError` too.

The token budget of an episode against an endpoint, which samples out of sight.

Invariant: what is spent is what the endpoint itself counted; with a budget, every call asks for at most what is left of it,
and an answer that was not counted is an error.

What an OpenAI-compatible endpoint answers, judged: a whole completion, or an error that says what is wrong with it.

Invariant: text that was cut by anything but the model or a limit of the call never passes for an answer; whatever an
endpoint does wrong is a `ServerError` that names episode and endpoint, and is never blamed on the workflow.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Iterable, Mapping
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import cached_property
from json import JSONDecodeError
from typing import Any, NoReturn, Self, cast

import numpy as np
import openai
from openai import AsyncOpenAI, AsyncStream
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.resources.chat.completions import AsyncCompletions
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.chat.chat_completion import Choice

from agentrl.client.arguments import RAW_RESPONSE_HEADER, MessageLike
from agentrl.client.budget import Ledger, Place
from agentrl.client.config import SamplingConfig
from agentrl.client.openai_base import CallTimeout, Chat, EpisodeClient, RawResponse
from agentrl.errors import ReplyError, RequestRejected, ServerError, ServerUnavailable, WorkflowError
from agentrl.types import EpisodeFailure, StopReason, Trajectory, Turn

_CUT = frozenset({"abort", "content_filter", "error"})
"""What endpoints call an answer that neither the model nor a limit of the call has ended."""
_SAID = {"content", "refusal", "tool_calls", "function_call", "audio", "reasoning_content", "reasoning"}

_UNREADABLE = (AssertionError, AttributeError, LookupError, TypeError, ValueError)
"""What reading a reply raises that has another shape."""


class Source:
    """Whom an episode asked, for what is wrong with the answer."""

    def __init__(self, episode_id: str, url: str) -> None:
        self._url = url
        self._where = f"episode {episode_id}, {url}"

    @contextmanager
    def errors(self) -> Generator[None, None, None]:
        """Turn what the openai client raises into the errors a workflow sees in training."""
        where, url = self._where, self._url
        try:
            yield
        except openai.APITimeoutError as error:
            raise CallTimeout(f"{where}: no answer within the call's timeout", url=url) from error
        except openai.APIConnectionError as error:
            raise ServerUnavailable(f"{where}: {error} ({error.__cause__!r})", url=url) from error
        except openai.APIStatusError as error:
            kind = RequestRejected if error.status_code < 500 and error.status_code != 429 else ServerUnavailable
            told = f"{where} answered {error.status_code}: {error.message}"
            raise kind(told, status=error.status_code, url=url) from error
        except openai.OpenAIError as error:
            raise ServerError(f"{where}: {error}", url=url) from error
        except JSONDecodeError as error:
            raise self.broken(f"what is not JSON: {error}") from error

    @contextmanager
    def reading(self, what: object) -> Generator[None, None, None]:
        """Turn what goes wrong in reading `what` into a `ReplyError` that shows it."""
        try:
            yield
        except _UNREADABLE as error:
            raise self.broken(f"{what!r:.200}") from error

    def broken(self, got: str) -> ReplyError:
        """Return the error for a reply that cannot be a turn."""
        return ReplyError(
            f"{self._where}: expected a chat completion with a finish_reason and with text, reasoning or a tool call, "
            f"got {got}. Nothing was recorded; call again, and if it comes back look into the endpoint's log",
            url=self._url,
        )

    def uncounted(self) -> ReplyError:
        """Return the error for a reply that does not say how much of a token budget it took."""
        return ReplyError(
            f"{self._where}: expected usage.completion_tokens in the reply, which rollout.max_episode_tokens is counted by; "
            "the endpoint reports no usage, so leave that budget out",
            url=self._url,
        )

    def choice(self, completion: ChatCompletion) -> Choice:
        """Return the first choice of a completion, checked: the openai client takes anything that is JSON.

        One that says nothing is whole where the endpoint counted sampled tokens: the model's own end of turn, hidden
        reasoning cut by `max_tokens`. In training those are turns, too.

        Raises:
            ReplyError: there is no choice, it was not finished by the model or a limit, or nothing was sampled.
        """
        with self.reading(completion):
            choice = completion.choices[0]
            said = choice.message.model_dump(include=_SAID, exclude_none=True, warnings=False)
        if not choice.finish_reason:
            raise self.broken(f"one that breaks off without a finish_reason: {said!r:.200}")
        if choice.finish_reason in _CUT:
            raise self.broken(f"one the endpoint cut, with finish_reason {choice.finish_reason!r}: {said!r:.200}")
        if not any(said.values()) and not counted(completion, "completion_tokens"):
            raise self.broken(f"an empty one, with finish_reason {choice.finish_reason!r}")
        return choice


def counted(completion: ChatCompletion, name: str) -> float | None:
    """Return a token count of the completion, None where the endpoint gives none."""
    count = getattr(completion.usage, name, None)
    return float(count) if isinstance(count, (int, float)) else None


_LIMITS = ("max_tokens", "max_completion_tokens")


class Budget:
    """How many tokens the endpoint may sample for one episode; None: any number."""

    def __init__(self, max_tokens: int | None) -> None:
        self._max = max_tokens
        self._spent = 0.0

    def check(self, ledger: Ledger) -> None:
        """Raise `EpisodeLimit` if the budget is spent, `WorkflowError` if the episode is closed by then."""
        if self._max is not None and self._spent >= self._max:
            ledger.check_open()
            raise ledger.spent(StopReason.TOKEN_LIMIT, f"{self._spent:g} of {self._max} sampled tokens are spent")

    def clip(self, arguments: dict[str, object], *, stream: bool) -> bool:
        """Lower the output limit in a call's `arguments` to what is left, and have a stream counted.

        Returns:
            Whether the stream will have a chunk with the count that the workflow did not ask for.
        """
        if self._max is None:
            return False
        room = int(self._max - self._spent)
        body = _mapping(arguments.get("extra_body"))
        for given in (arguments, body):
            for name in _LIMITS:
                if name in given:
                    asked = given[name]
                    given[name] = min(asked, room) if isinstance(asked, (int, float)) else room
        if not any(name in given for given in (arguments, body) for name in _LIMITS):
            arguments["max_tokens"] = room
        if body:
            arguments["extra_body"] = body
        options = _mapping(arguments.get("stream_options"))
        if stream:
            arguments["stream_options"] = {**options, "include_usage": True}
        return stream and not options.get("include_usage")

    def spend(self, count: float | None, source: Source) -> None:
        """Count the tokens of an answer.

        Raises:
            ReplyError: there is a budget, and the endpoint did not count.
        """
        if self._max is None:
            return
        if count is None or not count > 0:
            raise source.uncounted()
        self._spent += count


def _mapping(value: object) -> dict[str, object]:
    return dict(cast("Mapping[str, object]", value)) if isinstance(value, Mapping) else {}


class EndpointClient(EpisodeClient):
    """An `AsyncOpenAI` for one episode against a remote model, with the `reward`, `record` and `close` of `Client`.

    Args:
        endpoint: the connection, shared by all episodes of a run: `AsyncOpenAI(base_url=..., api_key=...)`.
        model: the model's name at the endpoint; what the workflow passes as `model` is replaced by it.
        episode_id: unique within the run.
        task_id: the task the episode is of.
        sampling: temperature, top_p and max_tokens of calls that say nothing; None leaves them to the endpoint.
        max_turns: completed calls allowed; a running call counts as one.
        max_episode_tokens: sampled tokens allowed, as for `Client`, by the endpoint's own count (`usage.completion_tokens`).
        on_turn: called with each turn as it is recorded.
    """

    def __init__(
        self,
        *,
        endpoint: AsyncOpenAI,
        model: str,
        episode_id: str,
        task_id: str,
        sampling: SamplingConfig | None = None,
        max_turns: int | None = None,
        max_episode_tokens: int | None = None,
        on_turn: Callable[[Turn], None] | None = None,
    ) -> None:
        self._adopt(endpoint)
        self.episode = EndpointEpisode(
            model, Ledger(episode_id, max_turns), Budget(max_episode_tokens), task_id, sampling, on_turn
        )
        self._record = self.episode

    def _adopt(self, endpoint: AsyncOpenAI) -> None:
        """Share the connection of `endpoint`, but none of its resources: they are bound to it."""
        self._endpoint = endpoint
        own = {name: value for name, value in vars(endpoint).items() if name not in _RESOURCES}
        self.__dict__.update(own)

    @cached_property
    def chat(self) -> Chat:  # pyright: ignore[reportIncompatibleMethodOverride] - openai's own descriptor
        """The chat endpoint; its calls are the episode's turns."""
        return Chat(self, self.answer)

    async def answer(
        self, messages: Iterable[MessageLike], stream: bool, arguments: Mapping[str, object]
    ) -> ChatCompletion | EndpointStream | RawResponse:
        """Return the endpoint's answer, after the retries of the openai client; this is `chat.completions.create`.

        An answer cut by the server, not by the model, raises: it must not look like an answer.
        """
        episode = self.episode
        filled = episode.fill(arguments)
        headers = dict(cast("Mapping[str, object]", filled.pop("extra_headers", None) or {}))
        raw = headers.pop(RAW_RESPONSE_HEADER, None) is not None
        ask = cast("Callable[..., Awaitable[object]]", AsyncCompletions(self).create)
        source = Source(episode.ledger.episode_id, str(self.base_url))
        episode.budget.check(episode.ledger)
        hides_usage = episode.budget.clip(filled, stream=stream)
        with episode.ledger.call():
            with source.errors():
                result = await ask(messages=list(messages), stream=stream, extra_headers=headers, **filled)
            if isinstance(result, ChatCompletion):
                episode.record(result, source, filled.get("temperature"))
            elif isinstance(result, AsyncStream):
                chunks = cast("AsyncStream[ChatCompletionChunk]", result)
                result = EndpointStream(chunks, episode, source, filled.get("temperature"), hides_usage)
            else:
                raise source.broken(f"{type(result).__name__} {result!r:.80}")
        return RawResponse(result, getattr(result, "id", "")) if raw else result

    async def generate(self, *arguments: object, **options: object) -> NoReturn:
        """Refuse: an OpenAI-compatible endpoint takes text, not token ids."""
        raise WorkflowError("client.generate needs token ids, which an OpenAI-compatible endpoint does not take; use chat")

    def copy(self, **options: Any) -> Self:  # noqa: ANN401 - pyright: the options of AsyncOpenAI.copy
        """Return a client of the same episode with other connection options; see `AsyncOpenAI.copy`."""
        other = object.__new__(type(self))
        other._adopt(self._endpoint.copy(**options))
        other.episode = self.episode
        other._record = self.episode
        return other

    with_options = copy


_RESOURCES = frozenset({"chat", "beta", "with_raw_response", "with_streaming_response"})
_NO_IDS = np.empty(0, np.int32)
_NO_LOGPROBS = np.empty(0, np.float32)


class EndpointEpisode:
    """What all clients of one episode share."""

    def __init__(
        self,
        model: str,
        ledger: Ledger,
        budget: Budget,
        task_id: str,
        sampling: SamplingConfig | None,
        on_turn: Callable[[Turn], None] | None,
    ) -> None:
        self.model = model
        self.ledger = ledger
        self.budget = budget
        self._task_id = task_id
        self._sampling = sampling
        self._on_turn = on_turn
        self._turns: list[Turn] = []
        self._tokens: dict[str, float] = {}

    def fill(self, arguments: Mapping[str, object]) -> dict[str, object]:
        """Return `arguments` with the model and the run's defaults."""
        filled = {name: value for name, value in arguments.items() if value is not None}
        filled["model"] = self.model
        if self._sampling is not None:
            filled.setdefault("temperature", self._sampling.temperature)
            filled.setdefault("top_p", self._sampling.top_p)
            if "max_completion_tokens" not in filled:
                filled.setdefault("max_tokens", self._sampling.max_tokens)
        return filled

    def record(self, completion: ChatCompletion, source: Source, temperature: object) -> None:
        """Add the turn of a completed call.

        Raises:
            WorkflowError: the episode was closed while the call ran.
            ReplyError: the completion is not whole, or not counted although there is a token budget.
        """
        self.ledger.check_open()
        choice = source.choice(completion)
        self.budget.spend(counted(completion, "completion_tokens"), source)
        turn = Turn(
            context_ids=_NO_IDS,
            output_ids=_NO_IDS,
            output_logprobs=_NO_LOGPROBS,
            spans=(),
            stop_reason=StopReason.LENGTH if choice.finish_reason == "length" else StopReason.STOP,
            parent=len(self._turns) - 1 if self._turns else None,
            message=choice.message.model_dump(exclude_none=True),
            temperature=float(temperature) if isinstance(temperature, (int, float)) else 1.0,
        )
        self.ledger.add_turn(completion.id, len(self._turns), completion)
        self._turns.append(turn)
        for name in ("prompt_tokens", "completion_tokens"):
            count = counted(completion, name)
            if count is not None:
                self._tokens[name] = self._tokens.get(name, 0.0) + count
        if self._on_turn is not None:
            self._on_turn(turn)

    def reward(self, target: object, value: object) -> None:
        """Set a turn's reward; see `Client.reward`."""
        turn = self.ledger.reward(target, value)
        self._turns[turn] = replace(self._turns[turn], reward=self.ledger.rewards[turn])

    def close(self, stop_reason: StopReason, final_reward: float | None, failure: EpisodeFailure | None) -> Trajectory:
        """End the episode and return what there is of it."""
        reward = self.ledger.close(final_reward)
        return Trajectory(
            episode_id=self.ledger.episode_id,
            task_id=self._task_id,
            turns=tuple(self._turns),
            stop_reason=stop_reason,
            final_reward=reward,
            failure=failure,
            metrics={**self._tokens, **self.ledger.metrics},
        )


class EndpointStream(AsyncStream[ChatCompletionChunk]):
    """The endpoint's stream; its turn is recorded with the last chunk."""

    def __init__(
        self,
        inner: AsyncStream[ChatCompletionChunk],
        episode: EndpointEpisode,
        source: Source,
        temperature: object,
        hides_usage: bool,
    ) -> None:
        self.response = inner.response
        self._inner = inner
        self._episode = episode
        self._source = source
        self._temperature = temperature
        self._hides_usage = hides_usage
        self._place = Place(episode.ledger)
        self._state = ChatCompletionStreamState()
        self._recorded = False

    async def __anext__(self) -> ChatCompletionChunk:
        """Return the next chunk.

        Raises:
            ServerError: as `chat.completions.create`; `ReplyError` for a stream that ends before the answer does.

        Cancellation: nothing is recorded.
        """
        try:
            with self._source.errors():
                chunk = await self._inner.__anext__()
            with self._source.reading(chunk):
                self._state.handle_chunk(chunk)
        except StopAsyncIteration:
            with closing(self._place):
                if not self._recorded:
                    self._recorded = True
                    with self._source.reading("a stream without chunks"):
                        whole = self._state.current_completion_snapshot
                    self._episode.record(whole, self._source, self._temperature)
            raise
        except BaseException:
            self._place.close()
            raise
        unasked = self._hides_usage and not chunk.choices and chunk.usage is not None
        return await anext(self) if unasked else chunk

    def __aiter__(self) -> AsyncIterator[ChatCompletionChunk]:
        """Return the stream itself."""
        return self

    async def close(self) -> None:
        """Drop the stream; without its last chunk nothing is recorded."""
        self._place.close()
        await self._inner.close()
