"""Histories as clients send them back: an answer that a client rewrote becomes the answer that was recorded.

Clients parse the arguments of tool calls and write them again, fill in defaults, convert types, drop reasoning, change ids.
An answer is found by the ids of its calls, else by its place in the conversation. It is taken for the recorded one only
where each difference has a name in `Change`; any other difference is an edit, which the token graph records as a fork.

Invariant: a message takes the place of another one only if it is the message of a recorded turn. Each change of a turn
counts once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, cast

from agentrl.tokens.messages import (
    ToolCallFields,
    calls_of,
    reasoning_of,
    role_of,
    split_thinking,
    text_of,
)
from agentrl.types import Message, Turn
from agentrl_doors.gateway.sessions.resent_changes import Change, json_field, same_arguments
from agentrl_doors.gateway.sessions.text_calls import calls_in_text, is_same_text

RESENT_METRIC: Final = "resent."
"""The metric of an episode is `resent.CHANGE`: answers that a client sent back so."""
_INVALID_TOOL: Final = "invalid"
"""The tool that opencode puts in the place of one that it does not know, or could not read."""


class ResentHistory:
    """Restores the requests of one episode.

    Args:
        turns: of the episode; it grows.
        metrics: of the episode, in which changes are counted.
    """

    def __init__(self, turns: Sequence[Turn], metrics: dict[str, float]) -> None:
        self._turns, self._metrics = turns, metrics
        self._positions: list[int] = []
        """Messages of each turn's conversation before its answer."""
        self._by_call: dict[str, int] = {}
        self._by_position: dict[int, list[int]] = {}
        self._counted: set[tuple[int, Change]] = set()

    def restored(self, messages: Sequence[Message], tools: object = None) -> list[Message]:
        """Return a request in which each answer that a client rewrote is the recorded one; `tools` are the request's."""
        self._index()
        found: list[Message] = []
        ids: dict[str, str] = {}
        for at, message in enumerate(messages):
            role = role_of(message)
            if role == "assistant":
                message = self._restored_answer(at, message, tools, ids)
            elif role == "tool" and message.get("tool_call_id") in ids:
                message = {**message, "tool_call_id": ids[message["tool_call_id"]]}
            found.append(message)
        return found

    def _index(self) -> None:
        for index in range(len(self._positions), len(self._turns)):
            turn = self._turns[index]
            position = len(turn.messages) + (0 if turn.parent is None else self._positions[turn.parent] + 1)
            self._positions.append(position)
            self._by_position.setdefault(position, []).append(index)
            for call in calls_of(turn.message):
                if call.id is not None:
                    self._by_call[call.id] = index

    def _restored_answer(self, at: int, message: Message, tools: object, ids: dict[str, str]) -> Message:
        calls = calls_of(message)
        known = next((self._by_call[call.id] for call in calls if call.id in self._by_call), None)
        candidates = reversed(self._by_position.get(at, ())) if known is None else (known,)
        for index in candidates:
            recorded = self._turns[index].message
            changes = changes_of(recorded, message, calls, tools)
            if changes is None:
                continue
            if not calls and not changes:
                return message  # text says what it is by itself
            for change in changes:
                if (index, change) not in self._counted:
                    self._counted.add((index, change))
                    name = RESENT_METRIC + change
                    self._metrics[name] = self._metrics.get(name, 0.0) + 1.0
            if Change.IDS in changes:
                pairs = zip(calls, calls_of(recorded), strict=True)
                ids.update({shown.id: call.id for shown, call in pairs if shown.id and call.id})
            return recorded
        return message


def changes_of(recorded: Message, shown: Message, calls: Sequence[ToolCallFields], tools: object) -> set[Change] | None:
    """Return how an answer that a client shows differs from a recorded one; None where it is another answer."""
    own = calls_of(recorded)
    changes: set[Change] = set()
    text, before = _text_of(shown), _text_of(recorded)
    is_one_kind = bool(own) == bool(calls)
    if not is_one_kind:  # one of the two has its calls in its text
        before, own = (before, own) if own else calls_in_text(before)
        text, calls = (text, calls) if calls else calls_in_text(text)
        before, text = " ".join(before.split()), " ".join(text.split())
        changes.add(Change.RESPELLED)
    if len(own) != len(calls):
        return None
    if text != before and not (not own and is_same_text(before, text, changes)):
        if text or not calls:
            return None
        changes.add(Change.TEXT)
    reasoning = (reasoning_of(shown) or "").strip()
    if reasoning and reasoning != (reasoning_of(recorded) or "").strip():
        changes.add(Change.REASONING)
    for call, given in zip(own, calls, strict=True):
        if is_one_kind and call.id != given.id:
            changes.add(Change.IDS)
        if call.name == given.name:
            same = same_arguments(call.arguments, given.arguments, _schema_of(tools, call.name), changes)
        else:
            same = given.name == _INVALID_TOOL and call.id == given.id
            changes.add(Change.RENAMED)
        if not same:
            return None
    return changes


def _text_of(message: Message) -> str:
    return split_thinking(text_of(message.get("content"), "assistant message")).content.strip()


def _schema_of(tools: object, name: str) -> object:
    """Return the schema of a tool's arguments; None if there is none."""
    for tool in cast("Sequence[object]", tools) if isinstance(tools, Sequence) else ():
        function = json_field(tool, "function")
        if json_field(function, "name") == name:
            return json_field(function, "parameters")
    return None
