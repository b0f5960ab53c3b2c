"""Reads the messages of requests: a key for each, and the reasoning they carry.

A request nearly always repeats the messages of an earlier one. A *trail* keeps shallow copies of the messages it has seen,
so that a few comparisons in C show whether they still say what they said; only what is new is read, and of a conversation
that goes on as expected not even that, until somebody asks for its keys.

Invariant: `MessageReader.read` returns what reading every message anew would return, whatever has been changed in place, and
`MessageReader.continued` adds to a trail only what it could read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

from openai.types.chat import ChatCompletionMessage
from pydantic import BaseModel

from agentrl.tokens.messages import KEY_BYTES, ROLES, read_message, reader
from agentrl.tokens.template import PlainMessage
from agentrl.types import Message

_MAX_TRAILS = 4
"""Conversations an episode remembers; a request of another one is read anew."""
_FLAT = frozenset({dict, ChatCompletionMessage})
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
            TokenError: for a message that cannot be rendered.
        """
        trail = self._trail(messages)
        keys: list[bytes] = []
        unwatched: dict[int, str] = {}
        for at in range(len(trail), len(messages)):
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
        known = len(trail)
        if len(messages) < known + 2 or not trail.covers(messages) or not _repeats(messages[known], answer):
            return None
        new = messages[known + 1 :]
        if not all(map(_is_plain, new)) or not trail.add(messages[known], like=answer):
            return None
        return trail.add_plain(cast("list[PlainMessage]", new))

    def _trail(self, messages: Sequence[Message]) -> Trail:
        """Return a trail of messages that `messages` begins with; an empty one if none is known."""
        trail = next((trail for trail in reversed(self._trails) if trail.covers(messages)), Trail())
        self._trails = [*[other for other in self._trails if other is not trail][1 - _MAX_TRAILS :], trail]
        return trail


class Trail:
    """Messages as they were when they were read, in order."""

    __slots__ = ("_copies", "_fields", "_inside", "_keys", "_kinds", "reasoning")

    def __init__(self) -> None:
        self.reasoning: dict[int, str] = {}
        self._keys = b""
        """Of the first messages."""
        self._kinds: list[type] = []
        self._fields: list[Message] = []
        """Shallow copies of the messages."""
        self._inside: list[Any] = []
        """What can change within a value: dicts and lists of text parts, tool calls and further fields."""
        self._copies: list[object] = []
        """Shallow copies of those."""

    def __len__(self) -> int:
        return len(self._kinds)

    def keys(self) -> bytes:
        """Return the keys of all messages."""
        unread = self._fields[len(self._keys) // KEY_BYTES :]
        if unread:
            self._keys += b"".join([read_message(fields).key for fields in unread])
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
        inside: list[Any] = []
        if not _watch(message, inside):
            return False
        fields, get = inside.pop(0), reader(message)  # these are looked up at each comparison
        content, calls = get("content"), get("tool_calls")
        if not (type(content) is str or content is None or _watch_parts(content, inside)):
            return False
        if not (calls is None or _watch_parts(calls, inside)):
            return False
        if key is None and (type(message) not in _FLAT or calls is not None or type(content) is not str):
            key = read_message(message).key  # what is inside may be another then
        if key is not None:
            self._keys = self.keys() + key
        self._kinds.append(type(message))
        self._fields.append(like if like is not None and like == fields else fields.copy())
        if inside:
            self._inside += inside
            self._copies += [item.copy() for item in inside]
        return True

    def add_plain(self, messages: list[PlainMessage]) -> list[PlainMessage]:
        """Remember messages that are plain; return copies, with the keys in the order in which templates see them."""
        copies = [{name: message[name] for name in _PLAIN if name in message} for message in messages]
        self._kinds += [dict] * len(copies)
        self._fields += copies
        return copies

    def covers(self, messages: Sequence[Message]) -> bool:
        """Return whether `messages` begins with these, unchanged."""
        top = messages[: len(self._kinds)]
        return (
            [*map(type, top)] == self._kinds
            and [item if type(item) is dict else item.__dict__ for item in top] == self._fields
            and self._inside == self._copies
        )


def _repeats(message: Message, answer: Message) -> bool:
    """Return whether a message means what `answer` does, and carries no reasoning."""
    text = answer["content"]
    if len(answer) == 2 and "</think>" not in text and _says(message, text):
        return True
    key, reasoning = read_message(message)
    return reasoning is None and key == read_message(answer).key


def _says(message: object, text: str) -> bool:
    """Return whether a message is the model's, and nothing but this text."""
    if type(message) is not ChatCompletionMessage or message.__pydantic_extra__:
        return message == {"role": "assistant", "content": text}
    get = message.__dict__.get  # a field may have been deleted
    nothing_else = get("tool_calls") is None and get("function_call") is None
    return get("content") == text and get("role") == "assistant" and nothing_else


def _is_plain(message: Message) -> bool:
    """Return whether a message is what a template takes as it is, and not the model's."""
    return (
        type(message) is dict
        and type(message.get("content")) is type(role := message.get("role")) is str
        and role in _ASKING
        and (len(message) == 2 or (message.keys() <= _PLAIN and {*map(type, message.values())} == {str}))
    )


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


def _watch(part: object, inside: list[Any]) -> bool:
    if type(part) is dict:
        inside.append(part)
        return True
    if not isinstance(part, BaseModel) or part.model_config.get("validate_assignment"):  # replaces its dict
        return False
    inside.append(part.__dict__)
    if part.__pydantic_extra__ is not None:
        inside.append(part.__pydantic_extra__)
    return True
