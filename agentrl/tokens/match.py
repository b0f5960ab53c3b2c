"""Finds the turn a request extends, by the meaning of its messages, at a cost that hardly grows with the history.

Each turn keeps the keys of the messages between the end of its parent and its own end, output included. The turns whose
conversations begin a request are found by walking down from the roots; while the turns form one line, by one comparison.

Invariant: `find` returns the deepest recorded turn whose messages and output begin the request, or none.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence

import msgspec

from agentrl.tokens.messages import KEY_BYTES, calls_of, read_message, role_of
from agentrl.tokens.reading import MessageReader, Trail
from agentrl.tokens.template import PlainMessage
from agentrl.types import Message, Turn

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
