"""An OpenAI-compatible endpoint as the backend of an episode: rewards, but no tokens (`agentrl eval`).

Invariant: requests are those of the openai client; each completed call is a turn without token ids, in order of completion.
A reply is a whole completion, or a `ServerError`; text that anything but the model or a limit cut is no answer.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from http import HTTPStatus
from json import JSONDecodeError
from typing import Any, NamedTuple, NoReturn, cast
from urllib.parse import urlsplit
from uuid import uuid4

import anyio
import numpy as np
import openai
from openai import AsyncOpenAI, AsyncStream, NotFoundError, OpenAIError
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.chat.chat_completion import Choice

from agentrl.client.arguments import RAW_RESPONSE_HEADER
from agentrl.client.backend import Answer, AnswerStream, AskedCall, ClientBackend, Piece
from agentrl.client.config import SamplingConfig
from agentrl.client.episode import REPORTED_NAMES, Episode, EpisodeSettings, RunningCall
from agentrl.client.offline import CallTimeout
from agentrl.episode.trajectory import are_independent
from agentrl.errors import ReplyError, RequestRejected, ServerError, ServerUnavailable, WorkflowError
from agentrl.inference.backend import Generation
from agentrl.support.foreign import one_line
from agentrl.tokens.history import continues_other_branch
from agentrl.tokens.messages import field_getter, plain_fields
from agentrl.types import BranchPath, ForkReason, Message, Speaker, StopReason, Turn

_CUT_REASONS = frozenset({"abort", "content_filter", "error"})
"""The finish reasons of an answer that neither the model nor a limit of the call has ended."""
_ANSWER_FIELDS = {"content", "refusal", "tool_calls", "function_call", "audio", "reasoning_content", "reasoning"}
_LIMIT_NAMES = ("max_tokens", "max_completion_tokens")
_UNREADABLE = (AssertionError, AttributeError, LookupError, TypeError, ValueError)
"""The errors of reading a reply that has another shape."""
_ASK_S = 5.0
"""Seconds that the endpoint has to list its models."""
_MAX_NAMES = 20
_NO_TOKENS = Generation(
    output_ids=np.empty(0, np.int32), output_logprobs=np.empty(0, np.float32), spans=(), stop_reason=StopReason.STOP
)


class EndpointBackend(ClientBackend):
    """Asks a remote model. The token budget counts what the endpoint reports (`usage.completion_tokens`).

    Calls get no seed: some endpoints refuse a request with `seed`, and those that take it promise no repeatable sampling. A
    `seed` that a workflow passes is sent.

    Args:
        endpoint: the connection, shared by all episodes of a run: `AsyncOpenAI(base_url=..., api_key=...)`.
        model: the model's name at the endpoint; it replaces what the workflow passes as `model`.
        settings: of the episode.
        sampling: default temperature, top_p and max_tokens; None leaves them to the endpoint.
    """

    def __init__(
        self, endpoint: AsyncOpenAI, model: str, settings: EpisodeSettings, *, sampling: SamplingConfig | None = None
    ) -> None:
        super().__init__(Episode(settings))
        self.connection = endpoint
        self._model = model
        self._sampling = sampling
        self._conversations = Conversations()
        self._tools: list[Sequence[Mapping[str, Any]] | None] = []
        """The tools of each turn's request."""
        self._identities: set[str] = set()

    @property
    def run_sampling(self) -> SamplingConfig | None:
        """The sampling arguments of the run."""
        return self._sampling

    @property
    def _endpoint(self) -> AsyncOpenAI:
        assert self.connection is not None
        return self.connection

    @property
    def tokenizer(self) -> NoReturn:
        """Refuse: the tokenizer of an endpoint's model is not known."""
        raise WorkflowError("client.tokenizer needs a model of this machine; an OpenAI-compatible endpoint has none")

    @property
    def graph(self) -> NoReturn:
        """Refuse: the tokens are sampled out of sight."""
        raise WorkflowError("client.graph needs token ids, which an OpenAI-compatible endpoint does not give")

    async def generate(
        self, input_ids: object, speaker: Speaker, timeout: float | None, sampling: Mapping[str, object]
    ) -> NoReturn:
        """Refuse: an OpenAI-compatible endpoint takes text, not token ids."""
        raise WorkflowError("client.generate needs token ids, which an OpenAI-compatible endpoint does not take; use chat")

    async def answer(self, asked: AskedCall) -> Answer:
        """Return the endpoint's answer, after the retries of the openai client."""
        with self.episode.start_call() as running:
            request, result = await self._send(asked, stream=False)
            if not isinstance(result, ChatCompletion):
                raise request.replies.broken(f"{type(result).__name__} {result!r:.80}")
            answer = self.record(result, request, self.own_identity(result.id))
            running.complete()
        return answer

    async def stream(self, asked: AskedCall) -> AnswerStream:
        """Return the endpoint's answer in its own chunks."""
        with self.episode.start_call():
            request, result = await self._send(asked, stream=True)
            if not isinstance(result, AsyncStream):
                raise request.replies.broken(f"{type(result).__name__} {result!r:.80}")
            return _EndpointStream(self, cast("AsyncStream[ChatCompletionChunk]", result), request)

    def adopt(self, turn: Turn) -> None:
        """Add a turn that another model answered."""
        self._conversations.add(self._conversations.find(turn.messages, turn.branch), turn.message, turn.branch)
        self._tools.append(turn.tools)
        super().adopt(turn)

    async def _send(self, asked: AskedCall, *, stream: bool) -> tuple[SentRequest, object]:
        filled, messages = self._filled(asked.arguments), list(asked.messages)
        headers = dict(cast("Mapping[str, object]", filled.pop("extra_headers", None) or {}))
        headers.pop(RAW_RESPONSE_HEADER, None)
        request = self._sent(asked, messages, filled)
        hides_usage = self._limit_output(filled, stream=stream)
        try:
            with request.replies.errors():
                create: Callable[..., Any] = self._endpoint.chat.completions.create
                result: object = await create(messages=messages, stream=stream, extra_headers=headers, **filled)
        except RequestRejected as error:
            if error.status != HTTPStatus.NOT_FOUND:
                raise
            missing = await _describe_missing(self._endpoint, self._model)
            raise RequestRejected(f"{error}; {missing}", status=error.status, url=error.url) from error
        return request._replace(hides_usage=hides_usage), result

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

    def _sent(self, asked: AskedCall, messages: Sequence[object], arguments: Mapping[str, object]) -> SentRequest:
        """Return what the turn of a request that is sent now will keep of it."""
        started_s = time.perf_counter()
        temperature, tools = arguments.get("temperature"), arguments.get("tools")
        return SentRequest(
            speaker=asked.speaker,
            replies=ReplyReader(self.episode.id, str(self._endpoint.base_url)),
            continued=self._conversations.find(messages, asked.speaker.branch),
            tools=cast("Sequence[Mapping[str, Any]]", tools) if isinstance(tools, Sequence) and tools else None,
            temperature=float(temperature) if isinstance(temperature, (int, float)) else 1.0,
            sent_after=len(self.episode.turns),
            sent_at=next(self.episode.clock),
            started_s=started_s,
        )

    def _limit_output(self, arguments: dict[str, object], *, stream: bool) -> bool:
        """Lower the output limit in a call's `arguments` to what is left of a token budget, and ask for a stream's usage.

        Returns:
            Whether the stream will have a chunk with the usage that the workflow did not ask for.
        """
        if self.episode.calls.max_tokens is None:
            return False
        room = self.episode.calls.clip(self.episode.calls.max_tokens)
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

    def own_identity(self, given: object) -> str:
        """Return the id that an endpoint gave an answer, or another one where it gave none or gave it before."""
        identity = given if isinstance(given, str) and given and given not in self._identities else f"chatcmpl-{uuid4().hex}"
        self._identities.add(identity)
        return identity

    def record(self, completion: ChatCompletion, request: SentRequest, identity: str) -> Answer:
        """Add the turn of a call that is complete, and return its answer, which has the id `identity`.

        Raises:
            WorkflowError: the episode was closed while the call ran.
            ReplyError: the completion is not whole, or does not report the tokens that a token budget counts.
        """
        episode, speaker, parent = self.episode, request.speaker, request.continued.parent
        episode.check_open()
        choice = request.replies.choice(completion)
        sampled = _reported(completion, "completion_tokens") or 0
        if episode.calls.max_tokens is not None and sampled <= 0:
            raise request.replies.without_usage()
        changed = request.tools != (None if parent is None else self._tools[parent])
        stop_reason = StopReason.LENGTH if choice.finish_reason == "length" else StopReason.STOP
        turn = Turn(
            context_ids=np.empty(0, np.int32),
            output_ids=np.empty(0, np.int32),
            output_logprobs=np.empty(0, np.float32),
            spans=(),
            stop_reason=stop_reason,
            **speaker._asdict(),
            sent_after=request.sent_after,
            sent_at=request.sent_at,
            parent=parent,
            message=_message_of(choice),
            temperature=request.temperature,
            fork=ForkReason.NEW_CONVERSATION if parent is None and episode.turns else None,
            messages=request.continued.added,
            tools=(request.tools or ()) if changed else None,
            started_s=request.started_s,
            ended_s=time.perf_counter(),
        )
        self._conversations.add(request.continued, turn.message, speaker.branch)
        self._tools.append(request.tools)
        episode.turns.append(turn)
        for name in REPORTED_NAMES:
            count = _reported(completion, name)
            if count is not None:
                episode.reported_tokens[name] = episode.reported_tokens.get(name, 0.0) + count
        episode.announce(completion.id, sampled, completion, identity)
        return Answer(
            id=identity,
            model=completion.model,
            message=turn.message,
            generation=replace(_NO_TOKENS, stop_reason=stop_reason),
            logprobs=None if choice.logprobs is None else choice.logprobs.model_dump(),
            native=completion,
        )


class Continued(NamedTuple):
    """The place where a request continues the conversations so far."""

    parent: int | None
    """The turn that it continues; None: it starts a conversation."""
    conversation: tuple[Message, ...]
    """All of its messages."""
    added: tuple[Message, ...]
    """The messages after the answer of `parent`."""


class Conversations:
    """The requests and answers of the recorded turns: finds the turn that a request continues.

    It is the latest turn whose messages and answer the request begins with. Answers are compared by role, text and tool
    calls, because clients drop and add other fields; other messages by all fields that are not null.

    Example:
        >>> known, question = Conversations(), {"role": "user", "content": "2 + 2 = ?"}
        >>> known.add(known.find([question]), {"role": "assistant", "content": "4"})
        >>> answer, thanks = {"role": "assistant", "content": "4"}, {"role": "user", "content": "thanks"}
        >>> known.find([question, answer, thanks]).parent, known.find([thanks]).parent
        (0, None)
    """

    def __init__(self) -> None:
        self._turns: list[tuple[Message, ...]] = []
        self._branches: list[BranchPath] = []
        """The declared branch of each turn."""

    def find(self, messages: Sequence[object], branch: BranchPath = ()) -> Continued:
        """Return where a request of `messages`, mappings or openai objects, meets the recorded turns.

        Raises:
            WorkflowError: all turns of that conversation are of branches that were declared independent of `branch`.
        """
        # Shallow copies, because a workflow may change a message in place later.
        conversation = tuple([dict(message) for message in plain_fields(messages)])
        own, foreign, length, foreign_length = None, None, 0, 0
        for turn in reversed(range(len(self._turns))):
            known, is_foreign = self._turns[turn], are_independent(self._branches[turn], branch)
            if len(known) <= max(length, foreign_length) if is_foreign else own is not None:
                continue  # what is settled is not compared again: a conversation of n turns takes n comparisons
            if len(known) <= len(conversation) and all(map(_same, known, conversation)):
                if is_foreign:
                    foreign, foreign_length = turn, len(known)
                else:
                    own, length = turn, len(known)
        if foreign is not None and foreign_length > length:
            raise continues_other_branch(foreign, self._branches[foreign], branch)
        return Continued(own, conversation, conversation[length:])

    def add(self, request: Continued, answer: Message, branch: BranchPath = ()) -> None:
        """Record a turn: a request, its answer, and its declared branch."""
        self._turns.append((*request.conversation, answer))
        self._branches.append(branch)


def _same(known: Message, given: Message) -> bool:
    if known is given or known == given:
        return True
    if known.get("role") != given.get("role"):
        return False
    if known.get("role") == "assistant":
        return _stripped(known) == _stripped(given) and _called(known) == _called(given)
    return _not_null(known) == _not_null(given)


def _not_null(message: Message) -> Mapping[str, object]:
    return {name: value for name, value in message.items() if value is not None}


def _stripped(message: Message) -> object:
    content = message.get("content")
    return content.strip() if isinstance(content, str) else content or ""


def _called(message: Message) -> list[tuple[object, object]]:
    calls: list[tuple[object, object]] = []
    given = message.get("tool_calls")
    for call in given if isinstance(given, Sequence) else ():
        function = field_getter(field_getter(call)("function"))
        calls.append((function("name"), function("arguments")))
    return calls


class SentRequest(NamedTuple):
    """The part of a request that its turn keeps, and that its reply is read with."""

    speaker: Speaker
    replies: ReplyReader
    continued: Continued
    tools: Sequence[Mapping[str, Any]] | None
    temperature: float
    sent_after: int
    """The number of turns complete when it was sent."""
    sent_at: int
    """When it was sent, by the episode's clock of events."""
    started_s: float
    hides_usage: bool = False
    """Whether its stream has a chunk with the usage that the workflow did not ask for."""


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
        reasoning cut by `max_tokens`. In training those are turns, too. A choice that is not whole is a `ReplyError`.
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


class _EndpointStream(AnswerStream):
    """The endpoint's stream; its turn is recorded when it has ended."""

    def __init__(self, endpoint: EndpointBackend, inner: AsyncStream[ChatCompletionChunk], request: SentRequest) -> None:
        super().__init__("", "", include_usage=False)
        self.response = inner.response
        self.running = self._counted = RunningCall(endpoint.episode.calls)
        self._endpoint, self._inner, self._request = endpoint, inner, request
        self._state = ChatCompletionStreamState()

    async def next(self) -> Sequence[Piece]:
        """Return the next chunk, or the answer after the last one."""
        replies = self._request.replies
        try:
            with replies.errors():
                chunk = await self._inner.__anext__()
        except StopAsyncIteration:
            with replies.reading("a stream without chunks"):
                whole = self._state.current_completion_snapshot
            answer = self._endpoint.record(whole, self._request, self.id or self._endpoint.own_identity(""))
            self._counted.complete()
            return [answer]
        with replies.reading(chunk):
            self._state.handle_chunk(chunk)
        self.id, self.model = self.id or self._endpoint.own_identity(chunk.id), chunk.model
        is_unasked = self._request.hides_usage and not chunk.choices and chunk.usage is not None
        return [] if is_unasked else [chunk]

    async def close(self, error: BaseException | None = None) -> None:
        """Drop the connection of a stream that is left."""
        if error is None:
            await self._inner.close()


def _message_of(choice: Choice) -> Message:
    """Return the message of a choice; the parts of a stream carry the numbers of their calls, which no answer has."""
    message = choice.message.model_dump(exclude_none=True)
    for call in message.get("tool_calls", ()):
        call.pop("index", None)
    return message


def _reported(completion: ChatCompletion, name: str) -> int | None:
    """Return a token count of the completion, None where the endpoint reports none."""
    count = getattr(completion.usage, name, None)
    return int(count) if isinstance(count, (int, float)) and math.isfinite(count) else None


def _copied(value: object) -> dict[str, object]:
    return dict(cast("Mapping[str, object]", value)) if isinstance(value, Mapping) else {}


async def _describe_missing(endpoint: AsyncOpenAI, model: str) -> str:
    """Return what an endpoint that answered 404 lacks, the model or the path, and the fix; it raises nothing."""
    url = str(endpoint.base_url).rstrip("/")
    names: list[str] | None = None
    no_list = f"{url}/models gives no list of models"
    try:
        with anyio.move_on_after(_ASK_S):
            listed = await endpoint.with_options(max_retries=0).models.list()
            names = [one_line(str(each.id)) for each in listed.data]
    except NotFoundError:
        no_list = f"there is no {url}/models either"
    except (OpenAIError, AttributeError, TypeError, ValueError):  # no list, or a list in another shape
        names = None
    if names is None:
        if urlsplit(url).path.endswith("/chat/completions"):
            return f"the base URL must end before /chat/completions: try {url.removesuffix('/chat/completions')}"
        if not urlsplit(url).path.endswith("/v1"):
            return f"{no_list}; most servers have the OpenAI API under /v1: try {url}/v1"
        return f"{no_list}: this is perhaps no server with the OpenAI API, or its API has another path"
    if model not in names:
        offered = ", ".join(names[:_MAX_NAMES]) + (", ..." if len(names) > _MAX_NAMES else "")
        return f"the endpoint has no model {model!r}; it offers {offered or 'none'}: name one of them"
    return f"the endpoint has the model {model!r}, but no {url}/chat/completions: it perhaps serves no chat for this model"
