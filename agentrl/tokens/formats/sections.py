"""Reads calls that are a head with the name, then the arguments as one JSON object, then an end."""

from __future__ import annotations

import re
from dataclasses import dataclass

from agentrl.tokens.parse import ParsedCalls, RawCall, ReadCalls, Schemas, json_at, make_call, read_blocks, skip_space


@dataclass(frozen=True, slots=True, kw_only=True)
class SectionGrammar:
    """The texts of one format."""

    opening: str
    closing: str
    head: re.Pattern[str]
    """Matches the beginning of a call; its group `name` is the tool, a group `id` the id of the call."""
    tail: re.Pattern[str]
    """Matches the end of a call."""

    def read(self, text: str, tools: Schemas) -> ParsedCalls:
        """Return the calls of an answer."""
        return read_blocks(text, tools, opening=self.opening, closing=self.closing, decode=self._block)

    def _block(self, text: str, at: int, tools: Schemas) -> ReadCalls | None:
        calls: list[RawCall] = []
        while head := self.head.match(text, skip_space(text, at)):
            found = json_at(text, skip_space(text, head.end()))
            tail = None if found is None else self.tail.match(text, found[1])
            call = None if found is None else make_call(head["name"], found[0], head.groupdict().get("id"))
            if call is None or tail is None:
                return None
            calls.append(call)
            at = tail.end()
        return ReadCalls(calls, at)
