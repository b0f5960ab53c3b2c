"""Finds the turn a request extends, by the meaning of its messages, at a cost that hardly grows with the history.

Each turn keeps the keys of the messages between the end of its parent and its own end, output included. The turns whose
conversations begin a request are found by walking down from the roots; while the turns form one line, by one comparison.

Invariant: `find` returns the deepest recorded turn whose messages and output begin the request, or none.

Reads the messages of requests: a key for each, and the reasoning they carry.

A request nearly always repeats the messages of an earlier one. A *trail* keeps shallow copies of the messages it has seen
(and the openai objects themselves), so that a few comparisons in C show whether they still say what they said; only what is
new is read, and of a conversation that goes on as expected not even that, until somebody asks for its keys.

Invariant: `MessageReader.read` returns what reading every message anew would return, whatever has been changed in place, and
`MessageReader.continued` adds to a trail only what it could read.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

import msgspec
from openai.types.chat import ChatCompletionMessage
from pydantic import BaseModel

from agentrl.errors import WorkflowError
from agentrl.tokens.messages import KEY_BYTES, ROLES, calls_of, read_message, reader, role_of
from agentrl.tokens.template.environment import PlainMessage
from agentrl.types import Message, Turn

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


_NONE = -1


class Match(msgspec.Struct, frozen=True):
    """Where a request meets what is known."""

    keys: Callable[[], bytes]
    """Returns at least the keys of the messages of the request, `KEY_BYTES` each."""
    size: int
    """Messages of the request."""
    trail: Trail | None
    """A trail that begins with them; None if there is none."""
    turn: int | None
    """The turn to extend: the deepest one with the same tools."""
    length: int
    """Messages that turn's conversation covers, its output included; 0 without a turn."""
    length_any_tools: int
    """The same for the deepest turn whatever its tools."""
    edited: bool
    """The rest of the request holds a changed model output, or a model output in another place."""
    new: Sequence[PlainMessage] | None = None
    """The messages after `length`, where they are known to be plain and not the model's."""


class TurnIndex:
    """The conversations of one episode as a tree of turns."""

    def __init__(self) -> None:
        """Start without turns."""
        self._reader = MessageReader()
        self._known = b""
        """What `_keys` returned last; on one line, nothing is read before somebody asks."""
        self._ends = array("L", [0])
        """Where the keys of each turn end, after a 0."""
        self._newest: list[int] = [_NONE]
        """The latest child of the root, then of each turn."""
        self._sibling: list[int] = []
        """The child of the same parent recorded before each turn."""
        self._is_line = True
        """Whether every turn extends the one before it, so that all keys in order are one conversation."""
        self._last: tuple[Trail, int, Message] | None = None
        """A trail that begins with the request of the last turn, its length then, and the output, if all is one line."""

    def find(self, messages: Sequence[Message], tools: bytes, turns: Sequence[Turn], tools_of: Sequence[bytes]) -> Match:
        """Return where a request meets the known conversations.

        Args:
            messages: the messages of the request.
            tools: key of its tools.
            turns: the recorded turns.
            tools_of: key of the tools of each turn.

        Raises:
            TokenError: for a message that cannot be rendered.
        """
        if self._last is not None and tools_of[-1] == tools:
            trail, length, answer = self._last
            new = self._reader.continued(messages, trail, answer) if len(trail.seen) == length else None
            length += 1
            if new is not None:
                return Match(trail.keys, len(messages), trail, len(turns) - 1, length, length, False, new)
        keys, reasoning, trail = self._reader.read(messages)
        if self._is_line and not reasoning and turns and tools_of[-1] == tools and keys.startswith(self._keys()):
            length = self._ends[-1] // KEY_BYTES
            if "assistant" not in [role_of(message) for message in messages[length:]]:
                return Match(lambda: keys, len(messages), trail, len(turns) - 1, length, length, False)
        found = self._walk(keys, reasoning, turns)
        same = [turn for turn in found if tools_of[turn] == tools]
        end = max([found[turn] for turn in same], default=0)
        deepest = [turn for turn in same if found[turn] == end]
        turn = deepest[0] if deepest else None
        if len(deepest) > 1:
            at = end // KEY_BYTES - 1
            turn = _closest(messages[at], reasoning.get(at), deepest, turns)
        length_any = max(found.values(), default=0) // KEY_BYTES
        answers = [at for at in range(length_any, len(messages)) if role_of(messages[at]) == "assistant"]
        edited = bool(answers) and self._edited(keys, answers, found)
        return Match(lambda: keys, len(messages), trail, turn, end // KEY_BYTES, length_any, edited)

    def add(self, match: Match | None, known: int, tail: Message, parent: int | None) -> None:
        """Record the next turn.

        Args:
            match: of its request; None for a call made of ids.
            known: messages of the request that the parent's conversation covers.
            tail: the output.
            parent: the turn above it.
        """
        turn, place = len(self._sibling), 0 if parent is None else parent + 1
        added = 0 if match is None else match.size - known + 1
        self._is_line = self._is_line and match is not None and place == turn
        if self._is_line and match is not None and match.trail is not None:
            self._last = match.trail, match.size, tail
        else:
            self._known = self._keys()
            self._last = None
            if match is not None:
                self._known += match.keys()[known * KEY_BYTES : match.size * KEY_BYTES] + read_message(tail).key
        self._ends.append(self._ends[-1] + added * KEY_BYTES)
        self._sibling.append(self._newest[place])
        self._newest[place] = turn
        self._newest.append(_NONE)

    def output_turn(self, keys: bytes, at: int) -> int | None:
        """Return the latest turn whose output is message `at` of a request with these keys."""
        key = keys[at * KEY_BYTES : (at + 1) * KEY_BYTES]
        return next((turn for turn in reversed(range(len(self._sibling))) if self._added(turn).endswith(key)), None)

    def _keys(self) -> bytes:
        """Return the keys that each turn adds to its parent's, none for a call made of ids, one turn after the other."""
        if self._last is not None and len(self._known) < self._ends[-1]:
            trail, count, output = self._last
            self._known = trail.keys()[: count * KEY_BYTES] + read_message(output).key
        return self._known

    def _added(self, turn: int) -> bytes:
        return self._keys()[self._ends[turn] : self._ends[turn + 1]]

    def _children(self, turn: int) -> Iterator[int]:
        child = self._newest[turn + 1]
        while child != _NONE:
            yield child
            child = self._sibling[child]

    def _walk(self, keys: bytes, reasoning: Mapping[int, str], turns: Sequence[Turn]) -> dict[int, int]:
        """Return the turns whose conversations begin the request, and where each ends in `keys`."""
        found: dict[int, int] = {}
        places = [(_NONE, 0)]
        for turn, start in places:
            for child in self._children(turn):
                added = self._added(child)
                end = start + len(added)
                if added and keys.startswith(added, start) and _same(reasoning.get(end // KEY_BYTES - 1), turns[child]):
                    found[child] = end
                    places.append((child, end))
        return found

    def _edited(self, keys: bytes, answers: Sequence[int], found: Mapping[int, int]) -> bool:
        """Return whether one of the messages `answers`, known to no turn, is a model output changed or moved."""
        common, asked = max(found.values(), default=0), False
        for turn, start in ((_NONE, 0), *found.items()):
            for child in self._children(turn):
                request = self._added(child)[:-KEY_BYTES]
                shared = _shared(request, keys[start:])
                if start + shared > common:
                    common, asked = start + shared, False
                asked = asked or (start + shared == common and shared == len(request))
        at = common // KEY_BYTES
        return (asked and at in answers) or any(
            self.output_turn(keys, answer) is not None for answer in answers if answer >= at
        )


def _shared(first: bytes, second: bytes) -> int:
    """Return the length of the keys that both begin with."""
    length = len(first)
    while not second.startswith(first[:length]):
        length -= KEY_BYTES
    return length


def _same(reasoning: str | None, turn: Turn) -> bool:
    return reasoning is None or (turn.message.get("reasoning_content") or "").strip() == reasoning.strip()


def _closest(message: Message, reasoning: str | None, same: Sequence[int], turns: Sequence[Turn]) -> int:
    """Return the turn whose output a message most likely is: same call ids, then same reasoning, then the latest."""
    ids = [call.id for call in calls_of(message)]

    def likeness(index: int) -> tuple[bool, bool, int]:
        output = turns[index].message
        same_ids = [call.id for call in calls_of(output)] == ids
        return same_ids, (output.get("reasoning_content") or None) == reasoning, index

    return max(same, key=likeness)
