"""One episode over HTTP: its calls, and its rewards.

Invariant: a call becomes a turn of the client's own episode, by the backend of the client. Every call runs in the block of
the door, and none outlives it.
"""

from __future__ import annotations

import hashlib
import math
from functools import partial
from typing import Final, cast

import anyio
import orjson

from agentrl.client import Client
from agentrl.client.backend import AskedCall
from agentrl.concurrency import task_group
from agentrl.errors import RewardError
from agentrl.gateway.body import CallRefused
from agentrl.gateway.dialect import Dialect, DialectCall
from agentrl.gateway.items import ItemStore
from agentrl.gateway.sessions.calls import RecentCalls, SharedCall
from agentrl.gateway.sessions.dialects import served_dialects
from agentrl.gateway.sessions.matching import ResentHistory
from agentrl.servers.http.errors import decode_body
from agentrl.tokens.template.rendering import ToolSchemas
from agentrl.types import Speaker

JOINED_METRIC: Final = "gateway.joined_retries"
"""Requests that got the answer of an earlier one: a repetition whose first call ran, or whose answer did not arrive."""
IGNORED_METRIC: Final = "gateway.ignored."
"""The metric `gateway.ignored.FIELD`: requests with a field that has no effect."""
MAX_IGNORED: Final = 64
"""Fields of an episode that are counted by name; further ones count as `gateway.ignored.other`."""
_MAX_FIELD_NAME: Final = 100
_NOT_OF_THE_CALL: Final = frozenset({"stream", "stream_options"})
"""Fields that a client may change when it repeats a request."""


class EpisodeSession:
    """The episode of one client, as a server's routes see it.

    Args:
        client: its episode; its role, player and branch are the default of each call.
    """

    def __init__(self, client: Client) -> None:
        self.client = client
        self.store = ItemStore()
        """What the responses of the episode are kept in, for calls that name them by id."""
        self._recent = RecentCalls()
        self._ignored: set[str] = set()
        self._history = ResentHistory(client.episode.turns, client.episode.metrics)
        self._send, self._receive = anyio.create_memory_object_stream[SharedCall](math.inf)

    async def run(self) -> None:
        """Run the calls, in the context of the task that opened the door, until the session is cancelled."""
        async with task_group() as tasks, self._send, self._receive:
            async for call in self._receive:
                tasks.start_soon(call.run)

    def ask(self, dialect: Dialect, call: DialectCall, speaker: Speaker, sample: str, *, is_retry: bool) -> SharedCall:
        """Return the call that a request makes or repeats; requests with another `sample` are other requests."""
        identity = _identity(dialect, call, speaker, sample)
        found = self._recent.repeated(identity, is_retry=is_retry)
        if found is not None:
            self._count(JOINED_METRIC)
            return found
        for name in call.ignored:
            self._count_ignored(name)
        messages = self._history.restored(call.messages, call.arguments.get("tools"))
        arguments = dict(call.arguments) if call.model is None else {"model": call.model, **call.arguments}
        if call.stream:  # answers say how many tokens they took, and some endpoints count only when they are asked to
            arguments["stream_options"] = {"include_usage": True}
        asked = AskedCall(messages, arguments, speaker, self.client.timeout)
        keep = partial(dialect.keep, call, store=self.store)
        found = SharedCall(self.client.backend, asked, stream=call.stream, on_answer=keep)
        self._recent.add(identity, found)
        self._send.send_nowait(found)
        return found

    def count_tokens(self, call: DialectCall) -> int:
        """Return the number of tokens that the prompt of a call has; nothing is sent.

        Raises:
            CallRefused: the model is out of sight.
        """
        if self.client.backend.connection is not None:
            raise CallRefused("count_tokens needs the model's tokenizer, and this episode asks an endpoint", status=404)
        tools = cast("ToolSchemas | None", call.arguments.get("tools"))
        messages = self._history.restored(call.messages, tools)
        return self.client.graph.prepare(messages, tools, self.client.speaker.branch).context.size

    def reward(self, body: bytes) -> None:
        """Set the reward of one answer, or the final one, as `{"reward": 1.0, "response_id": "chatcmpl-..."}` says.

        Raises:
            RewardError: the value is no reward.
            CallRefused: the body is something else, no answer of this episode has the id, or there is a reward already.
        """
        fields = decode_body(body, dict[str, object])
        unknown = sorted(fields.keys() - {"reward", "response_id"})
        if unknown or "reward" not in fields:
            raise CallRefused(
                'a reward is {"reward": 1.0}, with "response_id" that of one answer; '
                + (f"got the fields {', '.join(unknown)}, too" if unknown else "the body has no reward")
            )
        if not self.client.episode.is_open:
            raise CallRefused("the episode has ended; its reward can no longer be set", status=409)
        answer, value = fields.get("response_id"), fields["reward"]
        if isinstance(value, str) or value is None:
            raise RewardError(f"a reward is a number, or an object of named parts that add up to it, got {value!r:.80}")
        if answer is None:
            self._reward_final(value)
        elif isinstance(answer, str):
            self._reward_answer(answer, value)
        else:
            raise CallRefused(f"response_id is the id of an answer, as text; got {answer!r:.80}")

    def _reward_final(self, value: object) -> None:
        episode = self.client.episode
        if episode.final_reward is not None:
            raise CallRefused(
                f"the episode has the final reward {episode.final_reward} already; a reward is set once", status=409
            )
        episode.reward_final(value)

    def _reward_answer(self, answer: str, value: object) -> None:
        episode = self.client.episode
        known = (episode.turn_of(dialect.answer_id(answer)) for dialect in served_dialects())
        turn = next((each for each in known if each is not None), None)
        if turn is None:
            raise CallRefused(f"no answer of this episode has the id {answer!r:.120}", status=404)
        if episode.turns[turn].reward is not None:
            present = episode.turns[turn].reward
            raise CallRefused(f"the answer {answer} has the reward {present} already; a reward is set once", status=409)
        episode.reward_turn(turn, value, self.client.speaker.branch)

    def _count_ignored(self, field: str) -> None:
        if field not in self._ignored and len(self._ignored) >= MAX_IGNORED:
            field = "other"
        else:
            self._ignored.add(field)
        self._count(IGNORED_METRIC + field[:_MAX_FIELD_NAME])

    def _count(self, name: str) -> None:
        metrics = self.client.episode.metrics
        metrics[name] = metrics.get(name, 0.0) + 1.0


def _identity(dialect: Dialect, call: DialectCall, speaker: Speaker, sample: str) -> bytes:
    body = {name: value for name, value in call.body.items() if name not in _NOT_OF_THE_CALL}
    marks = orjson.dumps([dialect.name, speaker.role, speaker.player, sample])
    text = orjson.dumps(body, option=orjson.OPT_SORT_KEYS | orjson.OPT_NON_STR_KEYS)
    return hashlib.blake2b(marks + text, digest_size=16).digest()
