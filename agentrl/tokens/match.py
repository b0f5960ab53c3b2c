"""Finds the turn a request extends, by the meaning of its messages, at a cost that hardly grows with the history.

Known conversations form a tree of message keys. A request walks it one lookup per message. The key of a message object seen
before is not computed again while every text in it is still the same string object; strings cannot change, so mutated
messages are noticed.

Invariant: `find` returns the deepest recorded turn whose messages and output begin the request, or none.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

from pydantic import BaseModel

from agentrl.tokens.messages import calls_of, message_key, reader, reasoning_of
from agentrl.types import Message, Turn


class SeenMessage:
    """A message object with its key, and the strings that prove it has not changed."""

    __slots__ = ("_calls", "_content", "_extra", "_fields", "_texts", "key", "message", "reasoning", "role")

    def __init__(self, message: object) -> None:
        """Read `message`; see `message_key`."""
        get = reader(message)
        self.message = message
        self.role: str = get("role")
        self.key = message_key(message)
        self.reasoning = reasoning_of(message) if self.role == "assistant" else None
        self._fields, self._extra = _storage(message)
        self._content: object = get("content")
        self._calls: object = get("tool_calls")
        self._texts = _texts(self._fields, self._extra, self.role, self._calls)
        if not (self._content is None or type(self._content) is str) or self._texts is None:
            self._fields = None

    def unchanged(self) -> bool:
        """Return whether the message object still says what it said; False where that cannot be seen cheaply."""
        fields = self._fields
        if (
            fields is None
            or fields.get("content") is not self._content
            or fields.get("role") is not self.role
            or fields.get("tool_calls") is not self._calls
            or (self._extra is not None and fields is not getattr(self.message, "__dict__", None))
        ):
            return False
        now = _texts(fields, self._extra, self.role, self._calls)
        return now is not None and len(now) == len(self._texts or ()) and all(map(operator.is_, now, self._texts or ()))


def _storage(message: object) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    """Return the dicts that hold the fields of a message: a dict itself, or a model's fields and extra fields."""
    if type(message) is dict:
        return cast("dict[str, Any]", message), None
    if isinstance(message, BaseModel):
        extra = message.__pydantic_extra__
        return cast("dict[str, Any]", message.__dict__), {} if extra is None else extra
    return None, None


def _texts(
    fields: dict[str, Any] | None, extra: dict[str, Any] | None, role: str, calls: object
) -> tuple[object, ...] | None:
    """Return every immutable value that key and reasoning depend on beside the content; None if one is mutable."""
    if fields is None:
        return None
    if role != "assistant":
        return (fields.get("name"),)
    get = (extra or fields).get
    texts = (get("reasoning_content"), get("reasoning"), get("thinking"))
    if not calls:
        return texts
    found: list[object] = [*texts]
    for call in cast("Sequence[object]", calls):
        function = reader(call)("function")
        inner = reader(call if function is None else function)
        arguments = inner("arguments")
        if arguments is not None and type(arguments) is not str:
            return None
        found += (inner("name"), arguments)
    return tuple(found)


class Match(NamedTuple):
    """Where a request meets what is known."""

    keys: list[bytes]
    """Key of every message of the request."""
    common: int
    """Messages the request shares with some known conversation."""
    node: int
    """The place in the tree after the common messages."""
    turn: int | None
    """The turn to extend: the deepest one with the same tools."""
    length: int
    """Messages that turn's conversation covers, its output included; 0 without a turn."""
    length_any_tools: int
    """The same for the deepest turn whatever its tools."""
    edited: bool
    """The rest of the request holds a changed model output, or a model output in another place."""


class TurnIndex:
    """The conversations of one episode as a tree of message keys."""

    def __init__(self) -> None:
        self._edges: dict[tuple[int, bytes], int] = {}
        self._turns_at: dict[int, tuple[int, ...]] = {}
        self._asked_at: set[int] = set()
        self._outputs: dict[bytes, int] = {}
        self._seen: dict[int, SeenMessage] = {}
        self._last: tuple[Sequence[SeenMessage], list[int]] = ([], [])

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
        seen = self._look(messages)
        keys = [item.key for item in seen]
        nodes = self._walk(seen, turns)
        common = len(nodes)
        turn: int | None = None
        length = length_any = 0
        for at in range(common - 1, -1, -1):
            here = self._turns_at.get(nodes[at])
            if here is None:
                continue
            length_any = length_any or at + 1
            same = [index for index in here if tools_of[index] == tools]
            if same:
                turn, length = (same[0] if len(same) == 1 else _closest(seen[at], same, turns)), at + 1
                break
        node = nodes[-1] if nodes else 0
        rest = seen[common:]
        changed = bool(rest) and rest[0].role == "assistant" and node in self._asked_at
        edited = changed or any(item.role == "assistant" and item.key in self._outputs for item in rest)
        return Match(keys, common, node, turn, length, length_any, edited)

    def add(self, keys: Sequence[bytes], node: int, common: int, tail: Message, turn: int) -> None:
        """Record that a request of messages `keys`, the first `common` of which lead to `node`, was answered by `tail`."""
        for key in keys[common:]:
            node = self._step(node, key)
        self._asked_at.add(node)
        key = message_key(tail)
        self._outputs[key] = turn
        node = self._step(node, key)
        self._turns_at[node] = (*self._turns_at.get(node, ()), turn)

    def output_turn(self, key: bytes) -> int | None:
        """Return the latest turn whose output has this key."""
        return self._outputs.get(key)

    def _step(self, node: int, key: bytes) -> int:
        return self._edges.setdefault((node, key), len(self._edges) + 1)

    def _look(self, messages: Sequence[Message]) -> list[SeenMessage]:
        known = self._seen
        found: list[SeenMessage] = []
        for message in messages:
            item = known.get(id(message))
            if item is None or item.message is not message or not item.unchanged():
                item = known[id(message)] = SeenMessage(message)
            found.append(item)
        if len(known) > 2 * len(messages) + 16:  # clients that build new objects for each request
            self._seen = {id(item.message): item for item in found}
        return found

    def _walk(self, seen: Sequence[SeenMessage], turns: Sequence[Turn]) -> list[int]:
        """Return the places in the tree after each message, as far as the messages are known."""
        last_seen, last_nodes = self._last
        nodes: list[int] = []
        node = 0
        aligned = True
        for at, item in enumerate(seen):
            aligned = aligned and at < len(last_nodes) and last_seen[at] is item
            if aligned:
                node = last_nodes[at]
            else:
                after = self._edges.get((node, item.key))
                if after is None:
                    break
                here = self._turns_at.get(after)
                if here is not None and item.reasoning is not None and not _same_reasoning(item.reasoning, here, turns):
                    break
                node = after
            nodes.append(node)
        self._last = (seen, nodes)
        return nodes


def _same_reasoning(reasoning: str, here: Sequence[int], turns: Sequence[Turn]) -> bool:
    return any((turns[index].message.get("reasoning_content") or "").strip() == reasoning.strip() for index in here)


def _closest(item: SeenMessage, same: Sequence[int], turns: Sequence[Turn]) -> int:
    """Return the turn whose output a message most likely is: same call ids, then same reasoning, then the latest."""
    ids = [call.id for call in calls_of(item.message)]

    def likeness(index: int) -> tuple[bool, bool, int]:
        output = turns[index].message
        same_ids = [call.id for call in calls_of(output)] == ids
        return same_ids, (output.get("reasoning_content") or None) == item.reasoning, index

    return max(same, key=likeness)
