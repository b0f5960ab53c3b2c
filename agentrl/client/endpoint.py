"""The client that workflows get under `agentrl eval`: any OpenAI-compatible endpoint, with rewards but without tokens.

Invariant: the requests are those of the openai client. A trajectory has one turn for each completed call, in order of
completion, with messages and rewards and without token ids, so it cannot be trained. A reply is a whole completion, or a
`ServerError` that names episode and endpoint; text that something other than the model or a limit cut is no answer.
"""

from __future__ import annotations

import math
import time
from collections.abc import AsyncIterator, Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from http import HTTPStatus
from json import JSONDecodeError
from typing import Any, NamedTuple, NoReturn, Self, cast

import numpy as np
import openai
from openai import AsyncOpenAI, AsyncStream
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.chat.chat_completion import Choice

from agentrl.client.arguments import RAW_RESPONSE_HEADER, MessageLike
from agentrl.client.calls import RunningCall
from agentrl.client.config import SamplingConfig
from agentrl.client.conversations import Continued, Conversations
from agentrl.client.episode import REPORTED_NAMES, EpisodeRecord
from agentrl.client.missing import describe_missing
from agentrl.client.openai_base import Answered, CallTimeout, EpisodeClient, RawResponse
from agentrl.errors import ReplyError, RequestRejected, ServerError, ServerUnavailable, WorkflowError
from agentrl.types import BranchPath, ForkReason, Speaker, StopReason, Turn

_CUT_REASONS = frozenset({"abort", "content_filter", "error"})
"""The finish reasons of an answer that neither the model nor a limit of the call has ended."""
_ANSWER_FIELDS = {"content", "refusal", "tool_calls", "function_call", "audio", "reasoning_content", "reasoning"}
_LIMIT_NAMES = ("max_tokens", "max_completion_tokens")
_UNREADABLE = (AssertionError, AttributeError, LookupError, TypeError, ValueError)
"""The errors of reading a reply that has another shape."""


class EndpointClient(EpisodeClient["EndpointEpisode"]):
    """An `AsyncOpenAI` for one episode against a remote model, with the `reward`, `record` and `close` of `Client`.

    Unlike `Client` it gives calls no seed: some endpoints refuse a request with `seed`, and those that take it promise no
    repeatable sampling. A `seed` that a workflow passes is sent.

    Args:
        endpoint: the connection, shared by all episodes of a run: `AsyncOpenAI(base_url=..., api_key=...)`.
        model: the model's name at the endpoint; it replaces what the workflow passes as `model`.
        episode_id: unique within the run.
        task_id: the task the episode is of.
        sampling: default temperature, top_p and max_tokens; None leaves them to the endpoint.
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
        episode = EndpointEpisode(episode_id, task_id, max_turns=max_turns, max_tokens=max_episode_tokens, on_turn=on_turn)
        super().__init__(
            episode,
            api_key=endpoint.api_key,
            base_url=str(endpoint.base_url),
            timeout=endpoint.timeout,
            max_retries=endpoint.max_retries,
        )
        self._endpoint = endpoint
        self._model = model
        self._sampling = sampling

    async def answer(self, messages: Iterable[MessageLike], stream: bool, arguments: Mapping[str, Any]) -> Answered:
        """Return the endpoint's answer, after the retries of the openai client; this is `chat.completions.create`.

        An answer cut by the server, not by the model, raises: it must not look like an answer.
        """
        episode, filled = self.episode, self._filled(arguments)
        headers = dict(cast("Mapping[str, object]", filled.pop("extra_headers", None) or {}))
        raw = headers.pop(RAW_RESPONSE_HEADER, None) is not None
        replies = ReplyReader(episode.id, str(self._endpoint.base_url))
        with episode.start_call() as running:
            request = episode.sent(messages := list(messages), filled, self.speaker.branch)
            hides_usage = episode.limit_output(filled, stream=stream)
            try:
                with replies.errors():
                    create: Callable[..., Any] = self._endpoint.chat.completions.create
                    result: object = await create(messages=messages, stream=stream, extra_headers=headers, **filled)
            except RequestRejected as error:
                if error.status != HTTPStatus.NOT_FOUND:
                    raise
                missing = await describe_missing(self._endpoint, self._model)
                raise RequestRejected(f"{error}; {missing}", status=error.status, url=error.url) from error
            if isinstance(result, ChatCompletion):
                episode.record(result, replies, request, speaker=self.speaker)
                running.complete()
            elif isinstance(result, AsyncStream):
                chunks = cast("AsyncStream[ChatCompletionChunk]", result)
                result = EndpointStream(chunks, episode, replies, request, hides_usage, speaker=self.speaker)
            else:
                raise replies.broken(f"{type(result).__name__} {result!r:.80}")
        return RawResponse(result, getattr(result, "id", "")) if raw else result

    async def generate(self, *arguments: object, **options: object) -> NoReturn:
        """Refuse: an OpenAI-compatible endpoint takes text, not token ids."""
        raise WorkflowError("client.generate needs token ids, which an OpenAI-compatible endpoint does not take; use chat")

    @property
    def tokenizer(self) -> NoReturn:
        """Refuse: the tokenizer of an endpoint's model is not known."""
        raise WorkflowError("client.tokenizer needs a model of this machine; an OpenAI-compatible endpoint has none")

    async def request(self, cast_to: object, options: Any, **details: Any) -> Any:  # noqa: ANN401
        """Send the request of another endpoint, such as embeddings, over the shared connection."""
        return await self._endpoint.request(cast("Any", cast_to), options, **details)

    def copy(self, **options: Any) -> Self:  # noqa: ANN401 - pyright: the options of AsyncOpenAI.copy
        """Return a client of the same episode with other connection options, those of `AsyncOpenAI.copy`."""
        other = self._twin()
        other._endpoint = endpoint = self._endpoint.copy(**options)
        other.base_url, other.timeout, other.max_retries = endpoint.base_url, endpoint.timeout, endpoint.max_retries
        return other

    with_options = copy

    def _filled(self, arguments: Mapping[str, object]) -> dict[str, object]:
        """Return `arguments` with the model and the run's defaults."""
        filled = {name: value for name, value in arguments.items() if value is not None}
        filled["model"] = self._model
        if self._sampling is not None:
            filled.setdefault("temperature", self._sampling.temperature)
            filled.setdefault("top_p", self._sampling.top_p)
            if "max_completion_tokens" not in filled:
                filled.setdefault("max_tokens", self._sampling.max_tokens)
        return filled


class SentRequest(NamedTuple):
    """What a turn keeps of its request."""

    continued: Continued
    tools: Sequence[Mapping[str, Any]] | None
    temperature: float
    sent_after: int
    """How many turns were complete when it was sent."""
    sent_at: int
    """When it was sent, by the episode's clock of events."""
    started_s: float


class EndpointEpisode(EpisodeRecord):
    """An episode whose tokens are sampled out of sight; its token budget counts what the endpoint reports."""

    def __init__(
        self,
        episode_id: str,
        task_id: str,
        *,
        max_turns: int | None,
        max_tokens: int | None,
        on_turn: Callable[[Turn], None] | None,
    ) -> None:
        """Start without turns; the arguments are those of `EndpointClient`."""
        super().__init__(episode_id, task_id, max_turns=max_turns, max_tokens=max_tokens, on_turn=on_turn)
        self._turns: list[Turn] = []
        self.turns = self._turns
        self._conversations = Conversations()
        self._tools: list[Sequence[Mapping[str, Any]] | None] = []
        """The tools of each turn's request."""

    def sent(self, messages: Sequence[MessageLike], arguments: Mapping[str, object], branch: BranchPath) -> SentRequest:
        """Return what the turn of a request that is sent now will keep of it.

        Raises:
            WorkflowError: the messages continue a turn of a branch that was declared independent of `branch`.
        """
        temperature, tools = arguments.get("temperature"), arguments.get("tools")
        return SentRequest(
            continued=self._conversations.find(messages, branch),
            tools=cast("Sequence[Mapping[str, Any]]", tools) if isinstance(tools, Sequence) and tools else None,
            temperature=float(temperature) if isinstance(temperature, (int, float)) else 1.0,
            sent_after=len(self._turns),
            sent_at=next(self.clock),
            started_s=time.perf_counter(),
        )

    def limit_output(self, arguments: dict[str, object], *, stream: bool) -> bool:
        """Lower the output limit in a call's `arguments` to what is left of a token budget, and ask for a stream's usage.

        Returns:
            Whether the stream will have a chunk with the usage that the workflow did not ask for.
        """
        if self.calls.max_tokens is None:
            return False
        room = self.calls.clip(self.calls.max_tokens)
        body = _copied(arguments.get("extra_body"))
        for given in (arguments, body):
            for name in _LIMIT_NAMES:
                if name in given:
                    asked = given[name]
                    given[name] = min(asked, room) if isinstance(asked, (int, float)) else room
        if not any(name in given for given in (arguments, body) for name in _LIMIT_NAMES):
            arguments["max_tokens"] = room
        if body:
            arguments["extra_body"] = body
        options = _copied(arguments.get("stream_options"))
        if stream:
            arguments["stream_options"] = {**options, "include_usage": True}
        return stream and not options.get("include_usage")

    def record(self, completion: ChatCompletion, replies: ReplyReader, request: SentRequest, *, speaker: Speaker) -> None:
        """Add the turn of a call of `speaker` that is complete.

        Raises:
            WorkflowError: the episode was closed while the call ran.
            ReplyError: the completion is not whole, or does not report the tokens that a token budget counts.
        """
        self.check_open()
        choice = replies.choice(completion)
        sampled = _reported(completion, "completion_tokens") or 0
        if self.calls.max_tokens is not None and sampled <= 0:
            raise replies.without_usage()
        parent = request.continued.parent
        changed = request.tools != (None if parent is None else self._tools[parent])
        turn = Turn(
            context_ids=np.empty(0, np.int32),
            output_ids=np.empty(0, np.int32),
            output_logprobs=np.empty(0, np.float32),
            spans=(),
            stop_reason=StopReason.LENGTH if choice.finish_reason == "length" else StopReason.STOP,
            role=speaker.role,
            player=speaker.player,
            branch=speaker.branch,
            sent_after=request.sent_after,
            sent_at=request.sent_at,
            parent=parent,
            message=choice.message.model_dump(exclude_none=True),
            temperature=request.temperature,
            fork=ForkReason.NEW_CONVERSATION if parent is None and self._turns else None,
            messages=request.continued.added,
            tools=(request.tools or ()) if changed else None,
            started_s=request.started_s,
            ended_s=time.perf_counter(),
        )
        self._conversations.add(request.continued, turn.message, speaker.branch)
        self._tools.append(request.tools)
        self._turns.append(turn)
        for name in REPORTED_NAMES:
            count = _reported(completion, name)
            if count is not None:
                self.reported_tokens[name] = self.reported_tokens.get(name, 0.0) + count
        self._announce(len(self._turns) - 1, completion.id, sampled, completion)

    def _set_reward(self, turn: int, reward: float) -> None:
        self._turns[turn] = replace(self._turns[turn], reward=reward, rewarded_at=next(self.clock))


class ReplyReader:
    """Reads the replies of an endpoint; each error names the episode and the endpoint."""

    def __init__(self, episode_id: str, url: str) -> None:
        self._url = url
        self._where = f"episode {episode_id}, {url}"

    @contextmanager
    def errors(self) -> Generator[None, None, None]:
        """Turn the errors of the openai client into those that a workflow sees in training."""
        where, url = self._where, self._url
        try:
            yield
        except openai.APITimeoutError as error:
            raise CallTimeout(f"{where}: no answer within the call's timeout", url=url) from error
        except openai.APIConnectionError as error:
            raise ServerUnavailable(f"{where}: {error} ({error.__cause__!r})", url=url) from error
        except openai.APIStatusError as error:
            kind = RequestRejected if error.status_code < 500 and error.status_code != 429 else ServerUnavailable
            raise kind(
                f"{where} answered {error.status_code}: {error.message}", status=error.status_code, url=url
            ) from error
        except openai.OpenAIError as error:
            raise ServerError(f"{where}: {error}", url=url) from error
        except JSONDecodeError as error:
            raise self.broken(f"what is not JSON: {error}") from error

    @contextmanager
    def reading(self, reply: object) -> Generator[None, None, None]:
        """Turn an error in reading `reply` into a `ReplyError` that shows it."""
        try:
            yield
        except _UNREADABLE as error:
            raise self.broken(f"{reply!r:.200}") from error

    def broken(self, got: str) -> ReplyError:
        """Return the error for a reply that cannot be a turn."""
        return ReplyError(
            f"{self._where}: expected a chat completion with a finish_reason and with text, reasoning or a tool call, "
            f"got {got}. Nothing was recorded; call again, and if the error returns look into the endpoint's log",
            url=self._url,
        )

    def without_usage(self) -> ReplyError:
        """Return the error for a reply that does not report how many tokens it took from a token budget."""
        return ReplyError(
            f"{self._where}: expected usage.completion_tokens in the reply, by which rollout.max_episode_tokens is counted; "
            "the endpoint reports no usage, so leave that budget out",
            url=self._url,
        )

    def choice(self, completion: ChatCompletion) -> Choice:
        """Return the first choice of a completion, checked: the openai client accepts anything that is JSON.

        A choice without text is whole where the endpoint counted sampled tokens: the model's own end of turn, or hidden
        reasoning cut by `max_tokens`. In training those are turns, too.

        Raises:
            ReplyError: there is no choice, it was not finished by the model or a limit, or nothing was sampled.
        """
        with self.reading(completion):
            choice = completion.choices[0]
            answer = choice.message.model_dump(include=_ANSWER_FIELDS, exclude_none=True, warnings=False)
        if not choice.finish_reason:
            raise self.broken(f"one that breaks off without a finish_reason: {answer!r:.200}")
        if choice.finish_reason in _CUT_REASONS:
            raise self.broken(f"one the endpoint cut, with finish_reason {choice.finish_reason!r}: {answer!r:.200}")
        if not any(answer.values()) and not _reported(completion, "completion_tokens"):
            raise self.broken(f"an empty one, with finish_reason {choice.finish_reason!r}")
        return choice


class EndpointStream(AsyncStream[ChatCompletionChunk]):
    """The endpoint's stream; its turn is recorded with the last chunk."""

    def __init__(
        self,
        inner: AsyncStream[ChatCompletionChunk],
        episode: EndpointEpisode,
        replies: ReplyReader,
        request: SentRequest,
        hides_usage: bool,
        *,
        speaker: Speaker,
    ) -> None:
        # AsyncStream.__init__ would read the response a second time.
        self.response = inner.response
        self._inner = inner
        self._episode = episode
        self._replies = replies
        self._request = request
        self._hides_usage = hides_usage
        self._speaker = speaker
        self._running = RunningCall(episode.calls)
        self._state = ChatCompletionStreamState()
        self._recorded = False

    async def __anext__(self) -> ChatCompletionChunk:
        """Return the next chunk.

        Raises:
            ServerError: as `chat.completions.create`; `ReplyError` for a stream that ends before the answer does.

        Cancellation: nothing is recorded.
        """
        try:
            with self._replies.errors():
                chunk = await self._inner.__anext__()
            with self._replies.reading(chunk):
                self._state.handle_chunk(chunk)
        except StopAsyncIteration:
            with self._running:
                if not self._recorded:
                    self._recorded = True
                    with self._replies.reading("a stream without chunks"):
                        whole = self._state.current_completion_snapshot
                    self._episode.record(whole, self._replies, self._request, speaker=self._speaker)
                    self._running.complete()
            raise
        except BaseException as error:
            self._running.__exit__(type(error), error, None)
            raise
        unasked = self._hides_usage and not chunk.choices and chunk.usage is not None
        return await anext(self) if unasked else chunk

    def __aiter__(self) -> AsyncIterator[ChatCompletionChunk]:
        """Return the stream itself."""
        return self

    async def close(self) -> None:
        """Drop the stream; without its last chunk nothing is recorded."""
        self._running.close()
        await self._inner.close()


def _reported(completion: ChatCompletion, name: str) -> int | None:
    """Return a token count of the completion, None where the endpoint reports none."""
    count = getattr(completion.usage, name, None)
    return int(count) if isinstance(count, (int, float)) and math.isfinite(count) else None


def _copied(value: object) -> dict[str, object]:
    return dict(cast("Mapping[str, object]", value)) if isinstance(value, Mapping) else {}
