"""Reads the messages of requests: a key for each, and the reasoning they carry.

A request nearly always repeats the messages of an earlier one. A *trail* keeps shallow copies of the messages it has seen
(and the openai objects themselves), so that a few comparisons in C show whether they still say what they said; only what is
new is read, and of a conversation that goes on as expected not even that, until somebody asks for its keys.

Invariant: `MessageReader.read` returns what reading every message anew would return, whatever has been changed in place, and
`MessageReader.continued` adds to a trail only what it could read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

from openai.types.chat import ChatCompletionMessage
from pydantic import BaseModel

from agentrl.errors import WorkflowError
from agentrl.tokens.messages import KEY_BYTES, ROLES, read_message, reader
from agentrl.tokens.template import PlainMessage
from agentrl.types import Message

_MAX_TRAILS = 4
"""Conversations an episode remembers; a request of another one is read anew."""
_FLAT: frozenset[type] = frozenset({dict, ChatCompletionMessage})
"""Kinds of messages that can be read from a shallow copy of their fields, if those are text."""
_ASKING = ROLES - {"assistant", "developer"}
"""Roles that templates take as they are, and that are not the model's."""
_PLAIN = dict.fromkeys(("role", "content", "tool_call_id", "name")).keys()
"""The keys that templates see of such messages, in the order of `plain_message`."""


class Reading(NamedTuple):
    """The messages of a request as the graph compares them."""

    keys: bytes
    """`KEY_BYTES` for each message."""
    reasoning: Mapping[int, str]
    """The reasoning that assistant messages carry themselves, by position."""
    trail: Trail | None
    """A trail that begins with these messages; None if there is none."""


class MessageReader:
    """Reads the requests of one episode."""

    def __init__(self) -> None:
        """Start without memory."""
        self._trails: list[Trail] = []

    def read(self, messages: Sequence[Message]) -> Reading:
        """Return the keys and the reasoning of messages.

        Raises:
            WorkflowError: for something that is not a message.
            TokenError: for a message that cannot be rendered.
        """
        trail = self._trail(messages)
        keys: list[bytes] = []
        unwatched: dict[int, str] = {}
        for at in range(len(trail.seen), len(messages)):
            if not isinstance(cast("object", messages[at]), (Mapping, BaseModel)):
                got = f"{type(messages[at]).__name__} {messages[at]!r:.80}"
                raise WorkflowError(f"messages[{at}] must be a dict or an openai message, got {got}")
            key, reasoning = read_message(messages[at])
            watching = not keys and trail.add(messages[at], key)
            if not watching:
                keys.append(key)
            if reasoning is not None:
                (trail.reasoning if watching else unwatched)[at] = reasoning
        if not keys:
            return Reading(trail.keys(), trail.reasoning, trail)
        return Reading(trail.keys() + b"".join(keys), {**trail.reasoning, **unwatched}, None)

    def continued(self, messages: Sequence[Message], trail: Trail, answer: Message) -> list[PlainMessage] | None:
        """Return what follows `answer`, if messages are the trail's, `answer`, then plain ones that are not the model's.

        The trail has all of them afterwards, and their keys are found out when somebody asks for them.
        """
        known = len(trail.seen)
        if len(messages) < known + 2 or not trail.covers(messages):
            return None
        plain: list[Any] = [*map(_plain, messages[known + 1 :])]
        if not all(plain) or not trail.add_answer(messages[known], answer):
            return None
        trail.seen += plain
        trail.types += [dict] * len(plain)
        return plain

    def _trail(self, messages: Sequence[Message]) -> Trail:
        """Return a trail of messages that `messages` begins with; an empty one if none is known."""
        trail = next((trail for trail in reversed(self._trails) if trail.covers(messages)), Trail())
        self._trails = [*[other for other in self._trails if other is not trail][1 - _MAX_TRAILS :], trail]
        return trail


class Trail:
    """Messages as they were when they were read, in order."""

    __slots__ = ("_copies", "_fields", "_inside", "_keys", "_models", "reasoning", "seen", "types")

    def __init__(self) -> None:
        self.reasoning: dict[int, str] = {}
        self._keys = b""
        """Of the first messages."""
        self.seen: list[object] = []
        """Shallow copies of the messages that are dicts, and the others themselves: openai objects."""
        self.types: list[type] = []
        """Theirs."""
        self._models: list[BaseModel] = []
        """Those of them that are openai objects."""
        self._fields: list[Message] = []
        """Shallow copies of their fields."""
        self._inside: list[Any] = []
        """What can change within a value: dicts and lists of text parts, tool calls and further fields."""
        self._copies: list[object] = []
        """Shallow copies of those."""

    def keys(self) -> bytes:
        """Return the keys of all messages."""
        known = len(self._keys) // KEY_BYTES
        if known < len(self.seen):
            fields = iter(self._fields)
            copies = [message if type(message) is dict else next(fields) for message in self.seen]
            self._keys += b"".join([read_message(copy).key for copy in copies[known:]])
        return self._keys

    def add(self, message: Message, key: bytes | None = None, like: Message | None = None) -> bool:
        """Remember a message that can be read.

        Args:
            message: it.
            key: its key; None: found out when somebody asks for it.
            like: a record, which nobody changes, so that it stands for a copy if it is equal.

        Returns:
            False, with nothing done, if a change in the message could not be seen.
        """
        kind, part = type(message), cast("Any", message)
        if kind not in _FLAT and not _is_watchable(part):
            return False
        fields, extra = (part, None) if kind is dict else (part.__dict__, part.__pydantic_extra__)
        get, inside = reader(part) if extra else fields.get, [] if extra is None else [extra]
        content, calls = get("content"), get("tool_calls")
        if not (type(content) is str or content is None or _watch_parts(content, inside)):
            return False
        if not (calls is None or _watch_parts(calls, inside)):
            return False
        if key is None and (kind not in _FLAT or calls is not None or type(content) is not str):
            key = read_message(message).key  # what is inside may be another then
        if key is not None:
            self._keys = self.keys() + key
        self._keep(part, fields.copy() if like is None or like != fields else like, inside)
        return True

    def add_answer(self, message: Message, answer: Message) -> bool:
        """Remember a message if it means what `answer`, a record, does, and carries no reasoning.

        Returns:
            False, with nothing done, if it does not, or if a change in it could not be seen.
        """
        part: Any = message
        text = answer["content"]
        flat = len(answer) == 2 and "</think>" not in text
        if flat and type(part) is ChatCompletionMessage and not (extra := part.__pydantic_extra__):
            fields = part.__dict__
            get = fields.get  # a field may have been deleted
            same = get("content") is text and type(role := get("role")) is str and role == "assistant"
            if same and get("tool_calls") is get("function_call") is None:
                self._keep(part, fields.copy(), () if extra is None else (extra,))
                return True
        if not (flat and type(part) is dict and part == answer):
            key, reasoning = read_message(message)
            if reasoning is not None or key != read_message(answer).key:
                return False
        return self.add(message, like=answer)

    def _keep(self, message: Any, copy: Message, inside: Sequence[Any]) -> None:  # noqa: ANN401
        self.types.append(kind := type(message))
        self.seen.append(copy if kind is dict else message)
        if kind is not dict:
            self._models.append(message)
            self._fields.append(copy)
        if inside:
            self._inside += inside
            self._copies += [item.copy() for item in inside]

    def covers(self, messages: Sequence[Message]) -> bool:
        """Return whether `messages` begins with these, unchanged."""
        top = messages[: len(self.seen)]
        same = [*map(type, top)] == self.types and top == self.seen  # a class may call anything its equal
        return same and self._inside == self._copies and [model.__dict__ for model in self._models] == self._fields


def _plain(message: Message) -> PlainMessage | None:
    """Return a copy of a message that is what a template takes as it is, and not the model's; else None."""
    if type(message) is not dict:
        return None
    role, content = message.get("role"), message.get("content")
    if not (type(content) is type(role) is str and role in _ASKING):
        return None
    if len(message) == 2:
        return {"role": role, "content": content}
    if message.keys() <= _PLAIN and {*map(type, message.values())} == {str}:
        return {name: message[name] for name in _PLAIN if name in message}
    return None


def _watch_parts(parts: object, inside: list[Any]) -> bool:
    """Watch a list of text parts or tool calls; return whether every change in it will be seen."""
    if type(parts) is list:
        inside.append(parts)
    elif type(parts) is not tuple:
        return False
    for part in cast("Sequence[object]", parts):
        if type(part) is str:
            continue
        if not _watch(part, inside):
            return False
        function = reader(part)("function")
        if function is not None and not _watch(function, inside):
            return False
        arguments = reader(part if function is None else function)("arguments")
        if arguments is not None and type(arguments) is not str:  # equal values may be spelled differently: 1 and True
            return False
    return True


def _watch(part: Any, inside: list[Any]) -> bool:  # noqa: ANN401
    if not _is_watchable(part):
        return False
    dicts = (part, None) if type(part) is dict else (part.__dict__, part.__pydantic_extra__)
    inside += [each for each in dicts if each is not None]
    return True


def _is_watchable(part: object) -> bool:
    """Return whether every change in a message, or in a part of one, can be seen in the dicts it has."""
    # A class that checks assignments replaces its dict, and one may find others equal that are not.
    simple = isinstance(part, BaseModel) and not part.model_config.get("validate_assignment")
    return type(part) is dict or (simple and type(part).__eq__ is BaseModel.__eq__)
