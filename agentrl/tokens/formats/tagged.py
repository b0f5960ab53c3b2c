"""Reads calls whose arguments stand in tags of their own, one a value: strings as they are, other values as JSON.

The type of a value follows from the schema of its tool. A value ends at its closing tag, if the next argument or the end of
the call follows; so a text may hold closing tags.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from agentrl.tokens.formats.pythonic import parse_literal
from agentrl.tokens.parse import (
    ParsedCalls,
    RawCall,
    ReadCalls,
    Schemas,
    json_at,
    make_call,
    read_blocks,
    skip_space,
)

_WORDS: Mapping[str, object] = {"True": True, "False": False, "None": None}
"""What templates write that turn values into text by Python's rules."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TagGrammar:
    """The tags of one format."""

    opening: str
    closing: str
    head: re.Pattern[str]
    """Matches the beginning of a call; its group `name` is the tool."""
    tail: str
    """Ends a call; empty if the block ends it."""
    key: re.Pattern[str]
    """Matches the beginning of an argument; its group `key` is the name, a group `string` says whether it is a text."""
    next_key: str
    """Text with which `key` begins."""
    close: str
    """Ends a value."""
    on_lines: bool = False
    """Whether a line break stands before and after each value."""
    many: bool = False
    """Whether a block may hold several calls."""

    def read(self, text: str, tools: Schemas) -> ParsedCalls:
        """Return the calls of an answer."""
        return read_blocks(text, tools, opening=self.opening, closing=self.closing, decode=self._block)

    def _block(self, text: str, at: int, tools: Schemas) -> ReadCalls | None:
        calls: list[RawCall] = []
        while True:
            head = self.head.match(text, skip_space(text, at))
            if head is None:
                return ReadCalls(calls, at) if calls else None
            found = self._arguments(text, head.end(), properties_of(tools, head["name"]))
            if found is None:
                return None
            values, end = found
            end = skip_space(text, end)
            call = make_call(head["name"], values)
            if call is None or not text.startswith(self.tail, end):
                return None
            calls.append(call)
            at = end + len(self.tail)
            if not self.many:
                return ReadCalls(calls, at)

    def _arguments(self, text: str, at: int, properties: Mapping[str, object]) -> tuple[dict[str, object], int] | None:
        values: dict[str, object] = {}
        while key := self.key.match(text, skip_space(text, at)):
            end = self._end_of_value(text, key.end())
            name = key["key"]
            if end is None or name in values:
                return None
            value = text[key.end() : end]
            if self.on_lines:
                value = value.removeprefix("\n").removesuffix("\n")
            told = key.groupdict().get("string")
            schema = properties.get(name) if told is None else {"type": "string"} if told == "true" else {}
            values[name] = typed_value(value, schema)
            at = end + len(self.close)
        return values, at

    def _end_of_value(self, text: str, at: int) -> int | None:
        ends = (self.next_key, self.tail or self.closing)
        while (at := text.find(self.close, at)) >= 0:
            after = skip_space(text, at + len(self.close))
            if text.startswith(ends, after) or (after == len(text) and not self.tail):
                return at
            at += len(self.close)
        return None


def properties_of(tools: Schemas, name: str) -> Mapping[str, object]:
    """Return the schemas of the arguments of a tool, by name; empty where they are not known."""
    for tool in tools or ():
        function = tool.get("function", tool)
        if isinstance(function, Mapping):
            fields = cast("Mapping[str, object]", function)
            parameters = fields.get("parameters")
            if fields.get("name") == name and isinstance(parameters, Mapping):
                properties = cast("Mapping[str, object]", parameters).get("properties")
                return cast("Mapping[str, object]", properties) if isinstance(properties, Mapping) else {}
    return {}


def typed_value(text: str, schema: object) -> object:
    """Return the value that a text stands for under a schema; the text itself where it is no other value.

    Example:
        >>> [typed_value("12", {"type": kind}) for kind in ("string", "integer")], typed_value("no", {"type": "integer"})
        (['12', 12], 'no')
    """
    kinds = _kinds(schema)
    if kinds == {"string"}:
        return text
    bare = text.strip()
    found = (_WORDS[bare], len(bare)) if bare in _WORDS else json_at(bare, 0)
    if found is None or found[1] != len(bare):
        written = parse_literal(bare) if kinds & {"array", "object"} else None  # by templates that use Python's notation
        found = None if written is None else (written, len(bare))
    if found is None or isinstance(found[0], str):
        return text
    value = found[0]
    return text if "string" in kinds and not _kinds_of_value(value) & kinds else value


def _kinds(schema: object) -> set[str]:
    """Return the JSON types that a schema allows; empty where it does not say."""
    if not isinstance(schema, Mapping):
        return set()
    fields = cast("Mapping[str, object]", schema)
    kind = fields.get("type")
    if isinstance(kind, str):
        return {kind}
    if isinstance(kind, list):
        return set(map(str, cast("list[object]", kind)))
    choices = fields.get("enum", [fields["const"]] if "const" in fields else None)
    if isinstance(choices, list):
        return set[str]().union(*map(_kinds_of_value, cast("list[object]", choices)))
    for key in ("anyOf", "oneOf"):
        if isinstance(options := fields.get(key), Sequence):
            found = [_kinds(option) for option in cast("Sequence[object]", options)]
            return set[str]().union(*found) if all(found) else set()
    return set()


def _kinds_of_value(value: object) -> set[str]:
    if isinstance(value, bool):
        return {"boolean"}
    if isinstance(value, (int, float)):
        return {"integer", "number"} if isinstance(value, int) else {"number"}
    names: Mapping[type, str] = {str: "string", list: "array", dict: "object"}
    return {names.get(type(value), "null")}
