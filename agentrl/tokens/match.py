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

from agentrl.tokens.messages import calls_of, message_key, reader, reasoning_of
from agentrl.types import Message, Turn


class SeenMessage:
    """A message object with its key, and the strings that prove it has not changed."""

    __slots__ = ("key", "message", "reasoning", "role", "texts")

    def __init__(self, message: object) -> None:
        get = reader(message)
        self.message = message
        self.role: str = get("role")
        self.key = message_key(message)
        self.reasoning = reasoning_of(message) if self.role == "assistant" else None
        self.texts = _texts(get)

    def unchanged(self) -> bool:
        """Return whether the message object still says what it said."""
        texts = self.texts
        now = None if texts is None else _texts(reader(self.message))
        if texts is None or now is None or len(now) != len(texts):
            return False
        return all(map(operator.is_, now, texts))


def _texts(get: Any) -> tuple[object, ...] | None:  # noqa: ANN401 - a bound `get` of a mapping or model
    """Return every immutable value the key depends on; None if it depends on something mutable."""
    content, calls = get("content"), get("tool_calls")
    if content is not None and type(content) is not str:
        return None
    role = get("role")
    if role != "assistant":
        return role, content, get("name")
    if not calls:
        return role, content, get("reasoning_content"), get("reasoning"), get("thinking")
    texts: list[object] = [role, content, get("reasoning_content"), get("reasoning"), get("thinking")]
    for call in cast("Sequence[object]", calls):
        function = reader(call)("function")
        inner = reader(call if function is None else function)
        arguments = inner("arguments")
        if arguments is not None and type(arguments) is not str:
            return None
        texts += (inner("name"), arguments)
    return tuple(texts)


class Match(NamedTuple):
    """Where a request meets what is known."""

    keys: list[bytes]
    """Key of every message of the request."""
    common: int
    """Messages the request shares with some known conversation."""
    node: int
    """The place in the tree after those messages."""
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
        node = common = length = length_any = 0
        turn: int | None = None
        for item in seen:
            after = self._edges.get((node, item.key))
            if after is None:
                break
            here = self._turns_at.get(after)
            if here is not None:
                if item.reasoning is not None and not _same_reasoning(item.reasoning, here, turns):
                    break
                length_any = common + 1
                same = [index for index in here if tools_of[index] == tools]
                if same:
                    turn, length = (same[0] if len(same) == 1 else _closest(item, same, turns)), common + 1
            node, common = after, common + 1
        rest = seen[common:]
        changed = bool(rest) and rest[0].role == "assistant" and node in self._asked_at
        edited = changed or any(item.role == "assistant" and item.key in self._outputs for item in rest)
        return Match(keys, common, node, turn, length, length_any, edited)

    def add(self, keys: Sequence[bytes], tail: Message, turn: int) -> None:
        """Record that a request of messages `keys` was answered by `tail` in `turn`."""
        node = 0
        for key in keys:
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
                item = SeenMessage(message)
                known[id(message)] = item
            found.append(item)
        if len(known) > 2 * len(messages) + 16:  # clients that build new objects for each request
            self._seen = {id(item.message): item for item in found}
        return found


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
