"""The conversations of an online run, and which of them a request or a feedback belongs to.

A request belongs to the conversation that it names, else to the one whose response it continues (`previous_response_id`),
else to the one whose recorded history it begins with. Each client sees its own conversations alone.

Invariant: a request joins a conversation by its history only if it begins with all that was said up to an answer of that
conversation, or holds the id of one of its tool calls. So a wrong guess is impossible but between conversations that said
the same.
"""

from __future__ import annotations

import hashlib
import itertools
import re
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Final, Generic, NamedTuple, TypeVar, cast

import anyio

from agentrl.client import EpisodeSettings
from agentrl.client.backend import Answer
from agentrl.client.episode import Episode
from agentrl.engine.buffer import Ticket
from agentrl.errors import InvariantError
from agentrl.tokens.history import next_prefix
from agentrl.tokens.messages import calls_of, message_key, role_of
from agentrl.types import Message, Task
from agentrl_doors.gateway.dialects import DIALECTS
from agentrl_doors.gateway.refusals import CallRefused
from agentrl_doors.gateway.sessions.session import Session
from agentrl_doors.online.conversation_files import StoredConversation

TRAFFIC: Final = Task(id="traffic", data={})
"""The task of every conversation."""
_ENDED: Final = 65536
"""Names and responses of ended conversations that get a reason of their own."""
_OPENINGS: Final = 1024
_CONVERSATION_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@-]{0,199}")
Value = TypeVar("Value")


class Mark(NamedTuple):
    """Something by which a client's requests name a conversation."""

    client: str
    kind: str
    """`name`, `answer`, `history`, `call` or `opening`."""
    value: str | bytes


class Conversation:
    """A conversation of one client, which is an episode of the run."""

    def __init__(
        self, identity: str, *, client: str, name: str | None, episode: Episode, ticket: Ticket, flight: ExitStack
    ) -> None:
        self.id = identity
        """Of its file; a restart leaves it as it is, while the episode gets the id of another group."""
        self.client = client
        """The name of the client's key."""
        self.name = name or identity
        """The id by which the client knows it."""
        self.episode, self.ticket = episode, ticket
        self.session: Session | None = None
        """Answers its requests; None after a restart, when only feedback can come."""
        self.marks: list[Mark] = []
        """The marks by which it is found."""
        self.expires_at = 0.0
        """The moment of `anyio.current_time` at which it ends if nobody uses it."""
        self.scope = anyio.CancelScope()
        """Around the calls."""
        self.flight = flight
        """Lists the episode among those in flight."""

    @property
    def is_busy(self) -> bool:
        """Whether a model call runs."""
        return self.episode.calls.in_flight > 0

    @property
    def has_feedback(self) -> bool:
        """Whether a reward was set."""
        return self.episode.final_reward is not None or any(turn.reward is not None for turn in self.episode.turns)


class _Remembered(Generic[Value]):
    """The last values by key."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._values: OrderedDict[Mark, Value] = OrderedDict()

    def __contains__(self, key: Mark) -> bool:
        return key in self._values

    def get(self, key: Mark) -> Value | None:
        """Return the value of a key; None if there is none, or too many came later."""
        return self._values.get(key)

    def put(self, key: Mark, value: Value) -> None:
        """Keep a value."""
        self._values[key] = value
        self._values.move_to_end(key)
        if len(self._values) > self._limit:
            self._values.popitem(last=False)


class OpenConversations:
    """The open conversations of all clients."""

    def __init__(self) -> None:
        self._open: dict[str, Conversation] = {}
        self._by_mark: dict[Mark, Conversation] = {}
        self._ended = _Remembered[None](_ENDED)
        self._openings = _Remembered[Conversation](_OPENINGS)

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[Conversation]:
        return iter(tuple(self._open.values()))

    def add(self, conversation: Conversation) -> None:
        """Add an open conversation; a later one of the same name takes the place of an earlier one."""
        self._open[conversation.id] = conversation
        self._mark(conversation, "name", conversation.name)

    def answered(self, conversation: Conversation, messages: Sequence[Message], answer: Answer) -> None:
        """Remember an answer, by which later requests find the conversation; `messages` are those of its request."""
        self.add_answer(conversation, answer.id)
        prefix = b""
        for message in (*messages, answer.message):
            prefix = next_prefix(prefix, message_key(message).digest)
        self._mark(conversation, "history", prefix)
        for call in calls_of(answer.message):
            if call.id is not None:
                self._mark(conversation, "call", call.id)

    def add_answer(self, conversation: Conversation, answer: str) -> None:
        """Remember the id of an answer."""
        self._mark(conversation, "answer", answer)

    def named(self, client: str, name: str) -> Conversation | None:
        """Return the open conversation of this name."""
        return self._by_mark.get(Mark(client, "name", name))

    def of_response(self, client: str, response_id: str) -> Conversation | None:
        """Return the open conversation with a response, whatever dialect it has."""
        found = (self._by_mark.get(Mark(client, "answer", answer)) for answer in _answer_ids(response_id))
        return next((each for each in found if each is not None), None)

    def has_ended(self, client: str, identity: str) -> bool:
        """Return whether a conversation of this name, or with this response, has ended."""
        marks = [Mark(client, "name", identity), *(Mark(client, "answer", each) for each in _answer_ids(identity))]
        return any(mark in self._ended for mark in marks)

    def continued(self, client: str, messages: Sequence[Message]) -> Conversation | None:
        """Return the open conversation that the messages of a request continue."""
        prefix, found = b"", None
        answers = [at for at, message in enumerate(messages) if role_of(message) == "assistant"]
        for at, message in enumerate(messages[: answers[-1] + 1] if answers else ()):
            prefix = next_prefix(prefix, message_key(message).digest)
            if at in answers:
                found = self._by_mark.get(Mark(client, "history", prefix), found)
        ids = (call.id for at in reversed(answers) for call in calls_of(messages[at]) if call.id is not None)
        by_call = (self._by_mark.get(Mark(client, "call", each)) for each in ids)
        return found or next((each for each in by_call if each is not None), None)

    def opened_by(self, client: str, body: bytes) -> Conversation | None:
        """Return the open conversation whose first request had this body."""
        found = self._openings.get(Mark(client, "opening", _body_digest(body)))
        return found if found is not None and found.episode.is_open else None

    def remember_opening(self, conversation: Conversation, body: bytes) -> None:
        """Remember the body of a first request."""
        self._openings.put(Mark(conversation.client, "opening", _body_digest(body)), conversation)

    def close(self, conversation: Conversation) -> None:
        """Forget a conversation that has ended, but for the fact that it has."""
        del self._open[conversation.id]
        for mark in conversation.marks:
            if self._by_mark.get(mark) is conversation:
                del self._by_mark[mark]
            if mark.kind in ("name", "answer"):
                self._ended.put(mark, None)

    def _mark(self, conversation: Conversation, kind: str, value: str | bytes) -> None:
        mark = Mark(conversation.client, kind, value)
        self._by_mark[mark] = conversation
        conversation.marks.append(mark)


def check_name(name: object) -> str:
    """Return the name that a client gave a conversation; it is refused where it could be mistaken in a path or a file."""
    if not isinstance(name, str) or _CONVERSATION_NAME.fullmatch(name) is None:
        raise CallRefused(
            "the id of a conversation is 1 to 200 letters, digits and any of '._:@-', from a letter or digit on; got "
            f"{name!r:.80}"
        )
    return name


def episode_name(identity: str, ticket: Ticket) -> str:
    """Return the id of a conversation's episode, which begins with the number of its group as every one does."""
    return f"{ticket.index}.{identity}"


def restored_episode(stored: StoredConversation, ticket: Ticket) -> Episode:
    """Return the episode of a conversation that an earlier process left, with its feedback."""
    episode = Episode(EpisodeSettings(episode_id=episode_name(stored.opened.id, ticket), task_id=TRAFFIC.id))
    events = [0]
    for answer, turn in stored.answers:
        episode.turns.append(turn)
        episode.announce(answer, len(turn.output_ids))
        events.append(turn.sent_at)
    for given in stored.feedback:
        if given.turn is None:
            episode.reward_final(given.reward)
            continue
        if given.at is None or given.turn >= len(episode.turns):
            raise InvariantError(f"conversation {stored.opened.id}: feedback for turn {given.turn}, which is not there")
        episode.clock = itertools.count(given.at)
        episode.reward_turn(given.turn, given.reward, episode.turns[given.turn].branch)
        events.append(given.at)
    episode.clock = itertools.count(max(events) + 1)
    return episode


def name_of(path_name: str | None, header: str | None, fields: Mapping[str, object]) -> str | None:
    """Return the name that a request gives its conversation: in its path, its header, or the metadata of its body."""
    metadata = fields.get("metadata")
    inside = cast("Mapping[str, object]", metadata).get("conversation_id") if isinstance(metadata, Mapping) else None
    found = next((each for each in (path_name, header, inside) if each is not None), None)
    return None if found is None else check_name(found)


def _answer_ids(response_id: str) -> list[str]:
    return [dialect.answer_id(response_id) for dialect in DIALECTS.values()]


def _body_digest(body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=16).digest()
