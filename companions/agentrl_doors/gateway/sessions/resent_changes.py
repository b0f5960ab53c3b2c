"""The differences between what a model wrote and what a client sends back for it, by name.

Invariant: two values are the same only where each difference between them has a name in `Change`.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Final, cast

from agentrl.tokens.messages import parse_arguments

_LARGEST: Final = 1.7976931348623157e308


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
    RESPELLED = "respelled"
    """Calls that are text, or JSON within text, are written in another way."""


def json_field(value: object, name: str) -> object:
    """Return a field of an object; None of anything else."""
    return cast("Mapping[str, object]", value).get(name) if isinstance(value, Mapping) else None


def same_arguments(sampled: object, shown: object, schema: object, changes: set[Change]) -> bool:
    """Return whether the arguments of two calls differ by named changes alone, which are added to `changes`."""
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
        items = json_field(schema, "items")
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
    fields = json_field(schema, "properties")
    for name in after.keys() - before.keys():
        field = json_field(fields, name)
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
        _is_same_value(before[name], after[name], json_field(fields, name), changes) for name in before.keys() & after.keys()
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
