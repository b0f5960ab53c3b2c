"""Tool calls that stand in text: clients that put their tools into the prompt read the calls out and write them again.

Invariant: two texts are the same only where their words are, and where each value of JSON in them is the same, or is a call
that differs by named changes alone. Text without JSON is never compared here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Final, NamedTuple, cast

from agentrl.tokens.messages import ToolCallFields, canonical_arguments
from agentrl.tokens.parse import parse_json
from agentrl_doors.gateway.sessions.resent_changes import Change, same_arguments

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_MARK: Final = re.compile(r"(</?[^<>\s]+>|\[/?[A-Z_]+\]|```\w*)")
_ARGUMENTS: Final = ("arguments", "parameters", "args", "input")
_MAX_MISSES: Final = 64
"""Braces that begin no JSON, in a text that is compared; one of more is another text."""
_DECODER: Final = json.JSONDecoder()


class _Broken(NamedTuple):
    """A block of a call that is no JSON."""

    words: tuple[str, ...]


class _TextParts(NamedTuple):
    """A text, taken apart."""

    words: list[tuple[str, ...]]
    """Those before, between and after the values."""
    values: list[object]


def is_same_text(recorded: str, shown: str, changes: set[Change]) -> bool:
    """Return whether two texts that differ are the same but for JSON and calls in them; adds the changes that they need.

    Example:
        >>> is_same_text('{"name": "f", "arguments": {"a": 1}}', '{"name":"f","arguments":{"a":1}}', set())
        True
    """
    before, after = _parts_of(recorded), _parts_of(shown)
    if before is None or after is None or not before.values or len(before.values) != len(after.values):
        return False
    found = {Change.RESPELLED}
    if not all(_is_same_part(old, new, found) for old, new in zip(before.values, after.values, strict=True)):
        return False
    are_calls = all(isinstance(value, _Broken) or _call_in(value) is not None for value in before.values)
    for old, new in zip(before.words, after.words, strict=True):
        if old == new:
            continue
        if not are_calls or (new != _marks_of(old) and (old, new) != ((), (_CLOSE,))):
            return False
        if len(new) < len(old):
            found.add(Change.TEXT)
    changes |= found
    return True


def calls_in_text(text: str) -> tuple[str, list[ToolCallFields]]:
    """Return the words before the calls that stand in a text, and the calls; none where it holds anything else.

    Example:
        >>> calls_in_text('I add. <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>')
        ('I add.', [ToolCallFields(id=None, name='add', arguments={'a': 1})])
    """
    parts = _parts_of(text)
    calls = [] if parts is None else [_call_in(value) for value in parts.values]
    found = [call for call in calls if call is not None]
    if parts is None or len(found) != len(calls):
        return text, []
    return " ".join(word for word in parts.words[0] if not _MARK.fullmatch(word)), found


def _parts_of(text: str) -> _TextParts | None:
    """Return the parts of a text; None where too many braces begin no JSON."""
    words, values = list[tuple[str, ...]](), list[object]()
    start = at = misses = 0
    while (found := _next_start(text, at)) is not None:
        if text.startswith(_OPEN, found):
            inner = found + len(_OPEN)
            end = text.find(_CLOSE, inner)
            body = text[inner : end if end >= 0 else len(text)]
            value, begin, stop = parse_json(body.strip()), inner, inner + len(body)
            value = _Broken(tuple(body.split())) if value is None else value
        else:
            try:
                value, stop = cast("tuple[object, int]", _DECODER.raw_decode(text, found))
            except (ValueError, RecursionError):
                misses += 1
                if misses > _MAX_MISSES:
                    return None
                at = found + 1
                continue
            begin = found
        words.append(_words_of(text[start:begin]))
        values.append(value)
        start = at = stop
    words.append(_words_of(text[start:]))
    return _TextParts(words, values)


def _next_start(text: str, at: int) -> int | None:
    """Return where the next call or object may begin."""
    starts = [found for found in (text.find(_OPEN, at), text.find("{", at)) if found >= 0]
    return min(starts, default=None)


def _words_of(text: str) -> tuple[str, ...]:
    return tuple(_MARK.sub(r" \1 ", text).split())


def _marks_of(words: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(word for word in words if _MARK.fullmatch(word))


def _is_same_part(before: object, after: object, changes: set[Change]) -> bool:
    call = _call_in(after)
    if isinstance(before, _Broken):
        if before != after:
            changes.add(Change.BROKEN)
        return before == after or call is not None
    recorded = _call_in(before)
    if recorded is None or call is None:
        return not isinstance(after, _Broken) and canonical_arguments(before) == canonical_arguments(after)
    return recorded.name == call.name and same_arguments(recorded.arguments, call.arguments, None, changes)


def _call_in(value: object) -> ToolCallFields | None:
    """Return a call that is written as an object with the name of a tool and its arguments; None for anything else."""
    if not isinstance(value, Mapping):
        return None
    fields = cast("Mapping[str, object]", value)
    name, key = fields.get("name"), next((each for each in _ARGUMENTS if each in fields), None)
    return ToolCallFields(None, name, fields[key]) if isinstance(name, str) and key is not None else None
