"""The client workflows get under `agentrl eval`: any OpenAI-compatible endpoint, with rewards but no tokens.

Invariant: the requests are the openai client's own; a trajectory made here has one turn for each completed call, in order
of completion, with messages and rewards and without token ids, so nothing of it can be trained. A reply that is not whole
(no finish_reason, nothing sampled, not a completion) is a `ReplyError` and no turn. A token budget counts what the endpoint
says it sampled; one that does not say is a `ReplyError` too.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import closing
from dataclasses import replace
from functools import cached_property
from typing import Any, NoReturn, Self, cast

import numpy as np
from openai import AsyncOpenAI, AsyncStream
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.resources.chat.completions import AsyncCompletions
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from agentrl.client.arguments import RAW_RESPONSE_HEADER
from agentrl.client.base import EpisodeClient
from agentrl.client.chat import Chat
from agentrl.client.config import SamplingConfig
from agentrl.client.endpoint_budget import Budget
from agentrl.client.endpoint_reply import Source, counted
from agentrl.client.ledger import Ledger, Place
from agentrl.client.messages import MessageLike
from agentrl.client.surface import RawResponse
from agentrl.errors import WorkflowError
from agentrl.types import EpisodeFailure, StopReason, Trajectory, Turn


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
