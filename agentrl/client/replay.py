"""A client that gives recorded answers, so that a workflow runs again without a model.

Invariant: a call gets the recorded answer to the same messages and tools, once. A call that was not recorded raises
`ReplayDiverged`, and the episode remembers it even if the workflow catches the error.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, NoReturn, cast

import anyio.lowlevel
import numpy as np
from openai import AsyncStream, NotGiven, Omit
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from agentrl.client.arguments import RAW_RESPONSE_HEADER, MessageLike, checked_messages
from agentrl.client.completion import chunk, chunk_header, completion, finish_reason, message_fields, usage
from agentrl.client.episode import MISSES_METRIC, REPORTED_NAMES, EpisodeRecord
from agentrl.client.openai_base import Answered, EpisodeClient, RawResponse
from agentrl.client.structured.demand import Demand, ToolSchema, read_demand
from agentrl.client.structured.instructions import Instructions
from agentrl.errors import ReplayDiverged, TokenError, WorkflowError
from agentrl.inference.backend import Generation
from agentrl.tokens.messages import message_key, plain_fields
from agentrl.types import BranchPath, EpisodeFailure, Int32Array, Message, Speaker, StopReason, Trajectory, Turn

_LIMITS: Final = (StopReason.TURN_LIMIT, StopReason.TOKEN_LIMIT, StopReason.CONTEXT_LIMIT, StopReason.DEADLINE)
_MAX_QUOTED_CHARS: Final = 200


class ReplayClient(EpisodeClient["ReplayEpisode"]):
    """An `AsyncOpenAI` whose answers are the turns of a recorded episode.

    Log-probs of tokens (`logprobs=True`) and `client.tokenizer` need the model's tokenizer, which a record does not have.

    Args:
        recorded: the episode; its turns have their messages.
    """

    def __init__(self, recorded: Trajectory) -> None:
        super().__init__(ReplayEpisode(recorded))

    async def answer(self, messages: Iterable[MessageLike], stream: bool, arguments: Mapping[str, Any]) -> Answered:
        """Return the recorded answer to these messages and tools; this is `chat.completions.create`.

        Raises:
            ReplayDiverged: they were not recorded.
            EpisodeLimit: the recorded episode ended here, at a limit.
        """
        await anyio.lowlevel.checkpoint()
        episode = self.episode
        with episode.refusals():
            if arguments.get("logprobs"):
                raise WorkflowError("a replay has no tokenizer, so it cannot give logprobs=True; drop the argument")
            tools = _tools(arguments)
            index = episode.take(checked_messages(messages), tools, self.speaker, _demand(arguments, tools))
        turn = episode.turns[-1]
        model = str(arguments.get("model") or "policy")
        identity = f"chatcmpl-replay-{episode.id}-{index}"
        generation, num_context = _generation(turn), episode.num_context_tokens(index)
        given: ChatCompletion | ReplayStream
        if stream:
            wants_usage = bool((arguments.get("stream_options") or {}).get("include_usage"))
            given = ReplayStream(_chunks(chunk_header(identity, model), turn, generation, num_context, wants_usage))
            episode.announce(identity, given)
        else:
            extra = arguments.get("extra_body") or {}
            ids = episode.context_of(index) if extra.get("return_token_ids") else None
            given = completion(identity, model, turn.message, generation, prompt_tokens=num_context, prompt_ids=ids)
            episode.announce(identity, given)
        raw = RAW_RESPONSE_HEADER in (arguments.get("extra_headers") or {})
        return RawResponse(given, identity) if raw else given

    async def generate(self, input_ids: Sequence[int] | Int32Array, **options: object) -> Generation:
        """Return the recorded output of a context of token ids.

        Raises:
            ReplayDiverged: it was not recorded.
        """
        await anyio.lowlevel.checkpoint()
        episode = self.episode
        with episode.refusals():
            index = episode.take_ids(np.asarray(input_ids, np.int32), self.speaker)
        generation = _generation(episode.turns[-1])
        episode.announce(f"chatcmpl-replay-{episode.id}-{index}", generation)
        return generation

    @property
    def tokenizer(self) -> NoReturn:
        """Refuse: a record has no tokenizer."""
        raise WorkflowError("client.tokenizer needs the model's files, which a replay does not read")

    def copy(self, **options: object) -> ReplayClient:
        """Return a client of the same episode; options about the connection change nothing."""
        return self._twin()

    with_options = copy


class ReplayEpisode(EpisodeRecord):
    """An episode that takes its turns from a recorded one."""

    def __init__(self, recorded: Trajectory) -> None:
        """Start without turns."""
        super().__init__(recorded.episode_id, recorded.task_id, max_turns=None, max_tokens=None, on_turn=None)
        self.recorded = recorded
        self.diverged: list[str] = []
        """What the workflow did that was not recorded."""
        if not any(turn.output_ids.size for turn in recorded.turns):
            self.reported_tokens = {name: recorded.metrics[name] for name in REPORTED_NAMES if name in recorded.metrics}
        self._instructions = Instructions() if MISSES_METRIC in recorded.metrics else None
        """The record's prompts carry instructions where answers were compared with them."""
        self._turns: list[Turn] = []
        self._order: list[int] = []
        self.turns = self._turns

    def take(self, messages: Sequence[Message], tools: Sequence[object], speaker: Speaker, demand: Demand | None) -> int:
        """Add the recorded turn that answers `messages`, and return its number in the record.

        Raises:
            ReplayDiverged: there is none that was not taken.
            EpisodeLimit: the recorded episode ended here, at a limit.
        """
        sent = messages if self._instructions is None else self._instructions.applied(messages, demand)
        asked = (_keys(sent), _plain_tools(tools))
        for index in self._left():
            same = (_keys(self._sent(index)), _plain_tools(self._tools_of(index))) == asked
            if same and self._speaker(index) == _who(speaker):
                self._add(index, speaker.branch)
                if self._instructions is not None and demand is not None:
                    self._compare(self._instructions, messages, demand, self.recorded.turns[index].message)
                return index

        def difference(index: int) -> str:
            same = (_keys(self._sent(index)), _plain_tools(self._tools_of(index))) == asked
            if same and self._speaker(index) != _who(speaker):
                return _speaker_difference(self._speaker(index), speaker)
            return _difference(self._sent(index), sent, self._tools_of(index), tools)

        return self._refuse(difference)

    def take_ids(self, ids: Int32Array, speaker: Speaker) -> int:
        """Add the recorded turn whose context is `ids`, as `take` does."""
        for index in self._left():
            if self._speaker(index) == _who(speaker) and np.array_equal(self.context_of(index), ids):
                return self._add(index, speaker.branch)

        def difference(index: int) -> str:
            if np.array_equal(self.context_of(index), ids):
                return _speaker_difference(self._speaker(index), speaker)
            return f"the workflow sent {len(ids)} token ids, which are not those that were recorded"

        return self._refuse(difference)

    def announce(self, identity: str, given: object) -> None:
        """Let `reward` find the turn that was added last by its completion."""
        turn = self._turns[-1]
        self._announce(len(self._turns) - 1, identity, len(turn.output_ids), given)

    def context_of(self, index: int) -> Int32Array:
        """Return the whole context of a recorded turn, [N] int32."""
        path = self.recorded.path(index)
        parts = [part for at in path for part in (self.recorded.turns[at].context_ids, self.recorded.turns[at].output_ids)]
        return np.concatenate(parts[:-1])

    def num_context_tokens(self, index: int) -> int:
        """Return the number of tokens of that context; 0 where the record has no tokens."""
        return len(self.context_of(index))

    def close(self, stop_reason: StopReason, final_reward: object, failure: EpisodeFailure | None) -> Trajectory:
        """End the episode; its turns are in the order of the record, whose calls may have run in parallel."""
        missing = len(self._left())
        if missing and failure is None and not self.diverged:
            self.diverged.append(f"the workflow ended after {len(self._turns)} of {len(self.recorded.turns)} recorded calls")
        pairs = sorted(zip(self._order, self._turns, strict=True), key=lambda pair: pair[0])
        self._turns[:] = [turn for _, turn in pairs]
        return super().close(stop_reason, final_reward, failure)

    def _compare(self, instructions: Instructions, messages: Sequence[Message], demand: Demand, answer: Message) -> None:
        instructions.remember(messages, demand, answer)
        self.metrics[MISSES_METRIC] = self.metrics.get(MISSES_METRIC, 0.0) + bool(demand.problem(answer))

    def _speaker(self, index: int) -> Speaker:
        turn = self.recorded.turns[index]
        return Speaker(role=turn.role, player=turn.player)

    def _sent(self, index: int) -> Sequence[Message]:
        return self.recorded.messages(index)[:-1]

    def _left(self) -> list[int]:
        return [index for index in range(len(self.recorded.turns)) if index not in self._order]

    def _add(self, index: int, branch: BranchPath) -> int:
        self.check_open()
        self._order.append(index)
        turn = self.recorded.turns[index]
        self._turns.append(replace(turn, reward=None, rewarded_at=None, sent_at=next(self.clock), branch=branch))
        return index

    def _refuse(self, difference: Callable[[int], str]) -> NoReturn:
        left, number = self._left(), len(self._turns) + 1
        if not left and self.recorded.failure is None and self.recorded.stop_reason in _LIMITS:
            raise self.calls.exceeded(self.recorded.stop_reason, "the recorded episode ended here")
        if left:
            what = f"call {number}: {difference(left[0])}"
        else:
            what = f"call {number}: the workflow asks the model once more; {len(self._turns)} calls were recorded"
        self.diverged.append(what)
        raise ReplayDiverged(what)

    def _tools_of(self, index: int) -> Sequence[object]:
        for at in reversed(self.recorded.path(index)):
            tools = self.recorded.turns[at].tools
            if tools is not None:
                return tools
        return ()

    def _set_reward(self, turn: int, reward: float) -> None:
        self._turns[turn] = replace(self._turns[turn], reward=reward, rewarded_at=next(self.clock))


class ReplayStream(AsyncStream[ChatCompletionChunk]):
    """The chunks of a recorded answer."""

    def __init__(self, chunks: Iterable[ChatCompletionChunk]) -> None:
        """Take the chunks; there is no connection."""
        self._chunks = deque(chunks)

    def __aiter__(self) -> ReplayStream:
        return self

    async def __anext__(self) -> ChatCompletionChunk:
        await anyio.lowlevel.checkpoint()
        if not self._chunks:
            raise StopAsyncIteration
        return self._chunks.popleft()

    async def __aenter__(self) -> ReplayStream:
        return self

    async def __aexit__(self, *details: object) -> None: ...

    async def close(self) -> None:
        """Drop what is left."""
        self._chunks.clear()


def _chunks(
    header: Mapping[str, object], turn: Turn, generation: Generation, num_context: int, wants_usage: bool
) -> list[ChatCompletionChunk]:
    delta = message_fields(turn.message)
    calls = cast("Sequence[Mapping[str, object]]", delta.get("tool_calls") or ())
    if calls:
        delta["tool_calls"] = [{"index": index, **call} for index, call in enumerate(calls)]
    made = [chunk(header, delta), chunk(header, {}, finish=finish_reason(turn.message, generation))]
    return [*made, chunk(header, None, usage=usage(num_context, generation))] if wants_usage else made


def _generation(turn: Turn) -> Generation:
    return Generation(
        output_ids=turn.output_ids, output_logprobs=turn.output_logprobs, spans=turn.spans, stop_reason=turn.stop_reason
    )


def _demand(arguments: Mapping[str, Any], tools: Sequence[object]) -> Demand | None:
    """Return what a call demands; None for what `sampling.unsupported: prompt` does not take."""
    given = {name: value for name, value in arguments.items() if not (value is None or isinstance(value, (Omit, NotGiven)))}
    try:
        return read_demand(given, cast("Sequence[ToolSchema]", tools))
    except WorkflowError:
        return None


def _tools(arguments: Mapping[str, Any]) -> Sequence[object]:
    tools = arguments.get("tools")
    if arguments.get("tool_choice") == "none" or not isinstance(tools, Iterable):
        return ()
    return list(cast("Iterable[object]", tools))


def _keys(messages: Sequence[Message]) -> list[object]:
    return [_key(message) for message in messages]


def _key(message: Message) -> object:
    """Return what a message is compared by: its meaning, or all of its fields where it holds more than text."""
    try:
        return message_key(message).digest
    except TokenError:
        return json.loads(json.dumps(plain_fields([message])[0], default=repr))


def _plain_tools(tools: Sequence[object]) -> object:
    return json.loads(json.dumps(tools, default=repr))


def _difference(
    recorded: Sequence[Message], asked: Sequence[Message], recorded_tools: Sequence[object], tools: Sequence[object]
) -> str:
    """Return how a request differs from the recorded one."""
    for at, (one, other) in enumerate(zip(recorded, asked, strict=False)):
        if _key(one) != _key(other):
            what = f"expected {_quoted_message(one)}, got {_quoted_message(other)}"
            return f"the workflow sent another message {at + 1}: {what}"
    if len(recorded) != len(asked):
        extra = _quoted_message((asked[len(recorded) :] or recorded[len(asked) :])[0])
        return f"the workflow sent {len(asked)} messages, expected {len(recorded)}; the first that differs is {extra}"
    if _plain_tools(recorded_tools) != _plain_tools(tools):
        return f"the workflow offered other tools: expected {_tool_names(recorded_tools)}, got {_tool_names(tools)}"
    return "the workflow sent the same request once more than it was recorded"


def _speaker_difference(recorded: Speaker, asked: Speaker) -> str:
    return f"another speaker made this call: expected {_quoted_speaker(recorded)}, got {_quoted_speaker(asked)}"


def _who(speaker: Speaker) -> Speaker:
    """Return a speaker without its branch: branches are numbered in the order of their opening, which may change."""
    return speaker._replace(branch=())


def _quoted_speaker(speaker: Speaker) -> str:
    return f"role {speaker.role!r} and player {speaker.player!r}"


def _tool_names(tools: Sequence[object]) -> str:
    named = [cast("Mapping[str, Any]", each).get("function", {}).get("name") for each in tools]
    return f"{named} with their schemas"


def _quoted_message(message: Message) -> str:
    text = repr({name: value for name, value in plain_fields([message])[0].items() if value is not None})
    return text if len(text) <= _MAX_QUOTED_CHARS else f"{text[:_MAX_QUOTED_CHARS]}..."
