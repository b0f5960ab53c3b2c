"""A recorded episode as a backend, so that a workflow runs again without a model.

Invariant: a call gets the recorded answer to the same messages and tools, once. One that the workflow gave up gets the
recorded pieces, and then nothing until the workflow gives it up. A call that was not recorded raises `ReplayDiverged`, and
the backend remembers it even if the workflow catches the error.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final, NoReturn, cast

import anyio.lowlevel
import numpy as np
from openai import NotGiven, Omit

from agentrl.client.arguments import checked_messages
from agentrl.client.backend import Answer, AnswerStream, AskedCall, ClientBackend, Delta, Piece
from agentrl.client.demand import Demand, Instructions, ToolSchema, read_demand
from agentrl.client.episode import MISSES_METRIC, REPORTED_NAMES, Episode, EpisodeSettings
from agentrl.client.offline import call_timeout
from agentrl.errors import ReplayDiverged, TokenError, WorkflowError
from agentrl.inference.backend import Generation
from agentrl.tokens.messages import message_key, plain_fields
from agentrl.types import EpisodeFailure, Int32Array, Message, Speaker, StopReason, Trajectory, Turn

_LIMITS: Final = (StopReason.TURN_LIMIT, StopReason.TOKEN_LIMIT, StopReason.CONTEXT_LIMIT, StopReason.DEADLINE)
_MAX_QUOTED_CHARS: Final = 200


class ReplayBackend(ClientBackend):
    """Answers with the turns of a recorded episode, which have their messages.

    Log-probs of tokens (`logprobs=True`) and `client.tokenizer` need the model's tokenizer, which a record does not have.
    """

    is_replay = True

    def __init__(self, recorded: Trajectory) -> None:
        super().__init__(Episode(EpisodeSettings(episode_id=recorded.episode_id, task_id=recorded.task_id)))
        self.recorded = recorded
        self.diverged: list[str] = []
        """Actions of the workflow that were not recorded."""
        if not any(turn.output_ids.size for turn in recorded.turns):
            reported = {name: recorded.metrics[name] for name in REPORTED_NAMES if name in recorded.metrics}
            self.episode.reported_tokens.update(reported)
        self._instructions = Instructions() if MISSES_METRIC in recorded.metrics else None
        """The record's prompts carry instructions where answers were compared with them."""
        self._order: list[int] = []
        """The number in the record of each turn."""

    @property
    def tokenizer(self) -> NoReturn:
        """Refuse: a record has no tokenizer."""
        raise WorkflowError("client.tokenizer needs the model's files, which a replay does not read")

    @property
    def graph(self) -> NoReturn:
        """Refuse: a record is not rendered again."""
        raise WorkflowError("client.graph needs the model's files, which a replay does not read")

    async def answer(self, asked: AskedCall) -> Answer:
        """Return the recorded answer to these messages and tools."""
        answer = await self._recorded(asked)
        if answer.generation.stop_reason is StopReason.ABORT:
            await self._until_given_up(asked)
        return answer

    async def _recorded(self, asked: AskedCall) -> Answer:
        await anyio.lowlevel.checkpoint()
        arguments = asked.arguments
        with self.episode.refusals():
            if arguments.get("logprobs"):
                raise WorkflowError("a replay has no tokenizer, so it cannot give logprobs=True; drop the argument")
            tools = _tools(arguments)
            index = self._take(checked_messages(asked.messages), tools, asked.speaker, _demand(arguments, tools))
        turn = self.episode.turns[-1]
        if turn.stop_reason is not StopReason.ABORT:  # as the call did that was recorded
            self.episode.calls.resolve(self.episode.calls.num_failures)
        wants_ids = cast("Mapping[str, object]", arguments.get("extra_body") or {}).get("return_token_ids")
        context = self._context_of(index)
        return Answer(
            id=self._announce(index),
            model=str(arguments.get("model") or "policy"),
            message=turn.message,
            generation=_generation(turn),
            num_context=len(context),
            prompt_ids=context if wants_ids else None,
        )

    async def stream(self, asked: AskedCall) -> AnswerStream:
        """Return the recorded answer in pieces; its turn is recorded at once."""
        options = cast("Mapping[str, object]", asked.arguments.get("stream_options") or {})
        answer = await self._recorded(asked)
        until_given_up = partial(self._until_given_up, asked)
        return _ReplayStream(answer, until_given_up, include_usage=bool(options.get("include_usage")))

    async def _until_given_up(self, asked: AskedCall) -> None:
        """Wait for the workflow to give the call up; a `timeout` of its own passes at once."""
        timeout = asked.arguments.get("timeout", asked.timeout)
        if isinstance(timeout, (int, float)):
            raise call_timeout(self.episode.id, float(timeout), is_recorded=True)
        await anyio.sleep_forever()

    async def generate(
        self, input_ids: Sequence[int] | Int32Array, speaker: Speaker, timeout: float | None, sampling: Mapping[str, object]
    ) -> Generation:
        """Return the recorded output of a context of token ids."""
        await anyio.lowlevel.checkpoint()
        with self.episode.refusals():
            index = self._take_ids(np.asarray(input_ids, np.int32), speaker)
        generation = _generation(self.episode.turns[-1])
        self._announce(index, generation)
        return generation

    def finish(self, failure: EpisodeFailure | None) -> None:
        """Put the turns in the order of the record, whose calls may have run in parallel."""
        turns = self.episode.turns
        if self._left() and failure is None and not self.diverged:
            self.diverged.append(f"the workflow ended after {len(turns)} of {len(self.recorded.turns)} recorded calls")
        pairs = sorted(zip(self._order, turns, strict=True), key=lambda pair: pair[0])
        turns[:] = [turn for _, turn in pairs]

    def _take(self, messages: Sequence[Message], tools: Sequence[object], speaker: Speaker, demand: Demand | None) -> int:
        """Add the recorded turn that answers `messages`, and return its number in the record."""
        sent = messages if self._instructions is None else self._instructions.applied(messages, demand)
        asked = (_keys(sent), _plain_tools(tools))
        for index in self._left():
            same = (_keys(self._sent(index)), _plain_tools(self._tools_of(index))) == asked
            if same and self._speaker(index) == _who(speaker):
                self._add(index, speaker)
                if self._instructions is not None and demand is not None:
                    self._compare(self._instructions, messages, demand, self.recorded.turns[index].message)
                return index

        def difference(index: int) -> str:
            same = (_keys(self._sent(index)), _plain_tools(self._tools_of(index))) == asked
            if same and self._speaker(index) != _who(speaker):
                return _speaker_difference(self._speaker(index), speaker)
            return _difference(self._sent(index), sent, self._tools_of(index), tools)

        return self._refuse(difference)

    def _take_ids(self, ids: Int32Array, speaker: Speaker) -> int:
        """Add the recorded turn whose context is `ids`, as `_take` does."""
        for index in self._left():
            if self._speaker(index) == _who(speaker) and np.array_equal(self._context_of(index), ids):
                return self._add(index, speaker)

        def difference(index: int) -> str:
            if np.array_equal(self._context_of(index), ids):
                return _speaker_difference(self._speaker(index), speaker)
            return f"the workflow sent {len(ids)} token ids, which are not those that were recorded"

        return self._refuse(difference)

    def _announce(self, index: int, given: object = None) -> str:
        """Count the turn that was added last, and return its id."""
        identity = f"chatcmpl-replay-{self.episode.id}-{index}"
        self.episode.announce(identity, len(self.episode.turns[-1].output_ids), given)
        return identity

    def _context_of(self, index: int) -> Int32Array:
        """Return the whole context of a recorded turn, [N] int32."""
        path = self.recorded.path(index)
        parts = [part for at in path for part in (self.recorded.turns[at].context_ids, self.recorded.turns[at].output_ids)]
        return np.concatenate(parts[:-1])

    def _compare(self, instructions: Instructions, messages: Sequence[Message], demand: Demand, answer: Message) -> None:
        instructions.remember(messages, demand, answer)
        metrics = self.episode.metrics
        metrics[MISSES_METRIC] = metrics.get(MISSES_METRIC, 0.0) + bool(demand.problem(answer))

    def _speaker(self, index: int) -> Speaker:
        turn = self.recorded.turns[index]
        return Speaker(role=turn.role, player=turn.player)

    def _sent(self, index: int) -> Sequence[Message]:
        return self.recorded.messages(index)[:-1]

    def _left(self) -> list[int]:
        return [index for index in range(len(self.recorded.turns)) if index not in self._order]

    def _add(self, index: int, speaker: Speaker) -> int:
        episode, turn = self.episode, self.recorded.turns[index]
        episode.check_open()
        self._order.append(index)
        sent_at = next(episode.clock)
        episode.turns.append(replace(turn, reward=None, rewarded_at=None, sent_at=sent_at, branch=speaker.branch))
        return index

    def _refuse(self, difference: Callable[[int], str]) -> NoReturn:
        left, number = self._left(), len(self.episode.turns) + 1
        if not left and self.recorded.failure is None and self.recorded.stop_reason in _LIMITS:
            raise self.episode.calls.exceeded(self.recorded.stop_reason, "the recorded episode ended here")
        if left:
            what = f"call {number}: {difference(left[0])}"
        else:
            what = f"call {number}: the workflow asks the model once more; {len(self.episode.turns)} calls were recorded"
        self.diverged.append(what)
        raise ReplayDiverged(what)

    def _tools_of(self, index: int) -> Sequence[object]:
        for at in reversed(self.recorded.path(index)):
            tools = self.recorded.turns[at].tools
            if tools is not None:
                return tools
        return ()


class _ReplayStream(AnswerStream):
    """A recorded answer in two pieces: its text, and all of it. One that was given up has the text in characters alone."""

    def __init__(self, answer: Answer, until_given_up: Callable[[], Awaitable[None]], *, include_usage: bool) -> None:
        super().__init__(answer.id, answer.model, include_usage=include_usage)
        self._answer, self._until_given_up = answer, until_given_up
        self._is_read = False

    async def next(self) -> Sequence[Piece]:
        """Return the pieces."""
        await anyio.lowlevel.checkpoint()
        if self._is_read:
            await self._until_given_up()
        self._is_read = True
        message = self._answer.message
        reasoning, content = str(message.get("reasoning_content") or ""), str(message.get("content") or "")
        if self._answer.generation.stop_reason is not StopReason.ABORT:
            return [Delta(reasoning, content), self._answer]
        # A workflow that left where the text said enough leaves at the same place.
        return [*(Delta(each, "") for each in reasoning), *(Delta("", each) for each in content)]

    async def close(self, error: BaseException | None = None) -> None:
        """Do nothing: the turn is recorded already."""


def _generation(turn: Turn) -> Generation:
    return Generation(
        output_ids=turn.output_ids, output_logprobs=turn.output_logprobs, spans=turn.spans, stop_reason=turn.stop_reason
    )


def _demand(arguments: Mapping[str, object], tools: Sequence[object]) -> Demand | None:
    """Return what a call demands; None for what `sampling.unsupported: prompt` does not take."""
    given = {name: value for name, value in arguments.items() if not (value is None or isinstance(value, (Omit, NotGiven)))}
    try:
        return read_demand(given, cast("Sequence[ToolSchema]", tools))
    except WorkflowError:
        return None


def _tools(arguments: Mapping[str, object]) -> Sequence[object]:
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
    """Return a speaker's role and player: branches are numbered in the order of their opening, which may change."""
    return Speaker(speaker.role, speaker.player)


def _quoted_speaker(speaker: Speaker) -> str:
    return f"role {speaker.role!r} and player {speaker.player!r}"


def _tool_names(tools: Sequence[object]) -> str:
    named = [cast("Mapping[str, Any]", each).get("function", {}).get("name") for each in tools]
    return f"{named} with their schemas"


def _quoted_message(message: Message) -> str:
    text = repr({name: value for name, value in plain_fields([message])[0].items() if value is not None})
    return text if len(text) <= _MAX_QUOTED_CHARS else f"{text[:_MAX_QUOTED_CHARS]}..."
