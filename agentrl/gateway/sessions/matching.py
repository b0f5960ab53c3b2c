"""Histories as clients send them back: an answer that a client rewrote becomes the answer that was recorded.

Clients parse the arguments of tool calls and write them again, fill in defaults, convert types, drop reasoning, change ids.
An answer is found by the ids of its calls, else by its place in the conversation. It is taken for the recorded one only
where each difference has a name in `Change`; any other difference is an edit, which the token graph records as a fork.

Invariant: a message takes the place of another one only if it is the message of a recorded turn. Each change of a turn
counts once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Final, cast

from agentrl.tokens.messages import (
    ToolCallFields,
    calls_of,
    parse_arguments,
    reasoning_of,
    role_of,
    split_thinking,
    text_of,
)
from agentrl.types import Message, Turn

RESENT_METRIC: Final = "resent."
"""The metric of an episode is `resent.CHANGE`: answers that a client sent back so."""
_LARGEST: Final = 1.7976931348623157e308
_INVALID_TOOL: Final = "invalid"
"""The tool that opencode puts in the place of one that it does not know, or could not read."""


class Change(StrEnum):
    """A difference between an answer and what a client sends back for it."""

    DEFAULTS = "defaults"
    """Arguments were added: the schema's default, or null."""
    DROPPED = "dropped"
    """Arguments that are null, or that the schema does not have, are gone."""
    COERCED = "coerced"
    """An argument has another type, as `"1"` and 1."""
    BLANKS = "blanks"
    """White space at the ends of lines of an argument, or ends of lines, differ."""
    OVERFLOW = "overflow"
    """A number that JavaScript cannot hold became null."""
    BROKEN = "broken"
    """Arguments that are not JSON became something that is."""
    RENAMED = "renamed"
    """The call became one of a tool `invalid`."""
    TEXT = "text"
    """The text beside the calls is gone."""
    REASONING = "reasoning"
    """The reasoning is another one."""
    IDS = "ids"
    """The calls have other ids."""


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
            if not calls and changes != {Change.REASONING}:
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
    """Return the changes that make a recorded answer the one shown, whose calls are `calls`; None: it is another one."""
    own = calls_of(recorded)
    if len(own) != len(calls):
        return None
    changes: set[Change] = set()
    text, before = _text_of(shown), _text_of(recorded)
    if text != before:
        if text or not calls:
            return None
        changes.add(Change.TEXT)
    reasoning = (reasoning_of(shown) or "").strip()
    if reasoning and reasoning != (reasoning_of(recorded) or "").strip():
        changes.add(Change.REASONING)
    for call, given in zip(own, calls, strict=True):
        if call.id != given.id:
            changes.add(Change.IDS)
        if call.name == given.name:
            same = _compare_arguments(call.arguments, given.arguments, _schema_of(tools, call.name), changes)
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
        function = _field_of(tool, "function")
        if _field_of(function, "name") == name:
            return _field_of(function, "parameters")
    return None


def _field_of(value: object, name: str) -> object:
    return cast("Mapping[str, object]", value).get(name) if isinstance(value, Mapping) else None


def _compare_arguments(sampled: object, shown: object, schema: object, changes: set[Change]) -> bool:
    before = parse_arguments(sampled)
    if before is None:
        if sampled != shown:
            changes.add(Change.BROKEN)
        return True
    return _is_same_value(before, {} if shown == "" else parse_arguments(shown), schema, changes)


def _is_same_value(before: object, after: object, schema: object, changes: set[Change]) -> bool:
    """Return whether two JSON values differ by named changes alone, which are added to `changes`."""
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        return _same_objects(cast("Mapping[str, object]", before), cast("Mapping[str, object]", after), schema, changes)
    if isinstance(before, list) and isinstance(after, list):
        old, new = cast("list[object]", before), cast("list[object]", after)
        items = _field_of(schema, "items")
        return len(old) == len(new) and all(
            _is_same_value(each, shown, items, changes) for each, shown in zip(old, new, strict=True)
        )
    if before == after and isinstance(before, bool) == isinstance(after, bool):
        return True
    change = _change_of_value(before, after)
    if change is not None:
        changes.add(change)
    return change is not None


def _same_objects(before: Mapping[str, object], after: Mapping[str, object], schema: object, changes: set[Change]) -> bool:
    fields = _field_of(schema, "properties")
    for name in after.keys() - before.keys():
        field = _field_of(fields, name)
        if after[name] is not None and not (
            isinstance(field, Mapping) and "default" in field and field["default"] == after[name]
        ):
            return False
        changes.add(Change.DEFAULTS)
    for name in before.keys() - after.keys():
        if before[name] is not None and not (isinstance(fields, Mapping) and name not in fields):
            return False
        changes.add(Change.DROPPED)
    return all(
        _is_same_value(before[name], after[name], _field_of(fields, name), changes) for name in before.keys() & after.keys()
    )


def _change_of_value(before: object, after: object) -> Change | None:
    if isinstance(before, str) and isinstance(after, str):
        return Change.BLANKS if _without_blanks(before) == _without_blanks(after) else None
    if after is None:
        is_large = isinstance(before, (int, float)) and not -_LARGEST <= before <= _LARGEST
        return Change.OVERFLOW if is_large else None
    if isinstance(before, str) and parse_arguments(before) == after and after is not None:
        return Change.COERCED
    if isinstance(after, list) and len(cast("list[object]", after)) == 1 and after == [before]:
        return Change.COERCED
    if not isinstance(before, (str, int, float)) or not isinstance(after, (str, int, float)):
        return None
    if _as_number(before) is not None and _as_number(before) == _as_number(after):
        return Change.COERCED
    return Change.COERCED if str(before).lower() == str(after).lower() else None


def _without_blanks(text: str) -> list[str]:
    return [line.rstrip() for line in text.splitlines()]


def _as_number(value: str | float) -> float | None:
    try:
        return float(value)
    except (ValueError, OverflowError):
        return None
