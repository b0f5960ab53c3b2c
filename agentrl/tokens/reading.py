"""Reads the messages of requests: a key for each, and the reasoning they carry.

A request nearly always repeats the messages of an earlier one. A *trail* keeps the values found in the messages it has read,
so that a few comparisons in C show whether they still say what they said; only what is new is read.

Invariant: `MessageReader.read` returns what reading every message anew would return, whatever has been changed in place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple, cast

from pydantic import BaseModel

from agentrl.tokens.messages import KEY_BYTES, read_message, reader
from agentrl.types import Message

_MAX_TRAILS = 4
"""Conversations an episode remembers; a request of another one is read anew."""


class Reading(NamedTuple):
    """The messages of a request as the graph compares them."""

    keys: bytes
    """`KEY_BYTES` for each message."""
    reasoning: Mapping[int, str]
    """The reasoning that assistant messages carry themselves, by position."""


class MessageReader:
    """Reads the requests of one episode."""

    def __init__(self) -> None:
        """Start without memory."""
        self._trails: list[_Trail] = []

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
            return Reading(trail.keys, trail.reasoning)
        return Reading(trail.keys + b"".join(keys), {**trail.reasoning, **unwatched})

    def _trail(self, messages: Sequence[Message]) -> _Trail:
        """Return a trail of messages that `messages` begins with, as many as are known."""
        trails = self._trails
        for trail in reversed(trails):
            if trail.covers(messages):
                if trail is not trails[-1]:
                    trails.remove(trail)
                    trails.append(trail)
                return trail
        begun = max((trail.common(messages) for trail in trails), key=len, default=_Trail())
        self._trails = [*trails[1 - _MAX_TRAILS :], begun]
        return begun


class _Trail:
    """Messages as they were when they were read, in order."""

    __slots__ = ("_copies", "_inside", "_kinds", "_names", "_sizes", "_values", "keys", "reasoning")

    def __init__(self) -> None:
        self.keys = b""
        self.reasoning: dict[int, str] = {}
        self._kinds: list[type] = []
        self._sizes: list[int] = []
        """Number of values of each message."""
        # One list over all messages: a list for each message would take more memory than what it holds.
        self._values: list[object] = []
        self._names: list[str] = []
        """Keys of the messages that are dicts; the fields of models are those of their class."""
        self._inside: list[Any] = []
        """What can change within a value: dicts and lists of text parts, tool calls and further fields."""
        self._copies: list[object] = []
        """Shallow copies of those."""

    def __len__(self) -> int:
        return len(self._kinds)

    def add(self, message: object, key: bytes) -> bool:
        """Remember a message that was just read; False, and nothing done, if a change in it could not be seen."""
        inside: list[Any] = []
        if type(message) is dict:
            fields = cast("dict[str, object]", message)
            content, calls = fields.get("content"), fields.get("tool_calls")
        elif isinstance(message, BaseModel) and _watch(message, inside):
            del inside[0]  # looked up at each comparison
            fields, get = message.__dict__, reader(message)
            content, calls = get("content"), get("tool_calls")
        else:
            return False
        if not (type(content) is str or content is None or _watch_parts(content, inside)):
            return False
        if not (calls is None or _watch_parts(calls, inside)):
            return False
        self.keys += key
        self._kinds.append(type(message))
        self._sizes.append(len(fields))
        self._values += fields.values()
        if fields is message:
            self._names += fields
        if inside:
            self._inside += inside
            self._copies += [item.copy() for item in inside]
        return True

    def covers(self, messages: Sequence[Message]) -> bool:
        """Return whether `messages` begins with these, unchanged."""
        count = len(self._kinds)
        top = messages if len(messages) == count else messages[:count]
        if [*map(type, top)] != self._kinds:
            return False
        fields = [cast("dict[str, object]", item) if type(item) is dict else item.__dict__ for item in top]
        return (
            [*map(len, fields)] == self._sizes
            and [*chain.from_iterable(map(dict.values, fields))] == self._values
            and [*chain.from_iterable([item for item in top if type(item) is dict])] == self._names
            and self._inside == self._copies
        )

    def common(self, messages: Sequence[Message]) -> _Trail:
        """Return a trail of those messages that `messages` begins with, unchanged."""
        found = _Trail()
        for at, message in enumerate(messages[: len(self)]):
            values, names, copies = len(found._values), len(found._names), len(found._copies)
            if not found.add(message, self.keys[at * KEY_BYTES : (at + 1) * KEY_BYTES]):
                break
            if (
                found._kinds[at] is not self._kinds[at]
                or found._sizes[at] != self._sizes[at]
                or found._values[values:] != self._values[values : len(found._values)]
                or found._names[names:] != self._names[names : len(found._names)]
                or found._copies[copies:] != self._copies[copies : len(found._copies)]
            ):
                return self.common(messages[:at])
            if at in self.reasoning:
                found.reasoning[at] = self.reasoning[at]
        return found


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
