"""MiniMax: M1 writes JSON lines in `<tool_calls>`, M2 `<minimax:tool_call><invoke name="NAME"><parameter name="KEY">`."""

from __future__ import annotations

import re
from functools import partial

from agentrl.tokens.formats.tagged import TagGrammar
from agentrl.tokens.parse import RawCall, ReadCalls, Schemas, ToolFormat, json_call, read_blocks

_TAGS = TagGrammar(
    opening="<minimax:tool_call>",
    closing="</minimax:tool_call>",
    head=re.compile(r'<invoke name="(?P<name>[^"\n]+)">'),
    tail="</invoke>",
    key=re.compile(r'<parameter name="(?P<key>[^"\n]+)">'),
    next_key="<parameter name=",
    close="</parameter>",
    many=True,
)


def _json_lines(text: str, at: int, tools: Schemas) -> ReadCalls | None:
    calls: list[RawCall] = []
    while found := json_call(text, at, tools):
        calls += found.calls
        at = found.end
    return ReadCalls(calls, at)


MINIMAX_M1 = ToolFormat(
    name="minimax_m1",
    openings=("<tool_calls>",),
    read=partial(read_blocks, opening="<tool_calls>", closing="</tool_calls>", decode=_json_lines),
)
MINIMAX_M2 = ToolFormat(name="minimax_m2", openings=("<minimax:tool_call>",), read=_TAGS.read)
