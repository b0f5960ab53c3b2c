"""Functionary: v3.1 writes `<function=NAME>{...}</function>`, v3.2 `>>>NAME` and the arguments on a line of their own.

In v3.2 the answer is a message to `all`; the generation prompt ends with the first `>>>`.
"""

from __future__ import annotations

import re
from functools import partial

from agentrl.tokens.parse import (
    ParsedCalls,
    RawCall,
    ReadCalls,
    Schemas,
    ThinkingSplit,
    ToolFormat,
    json_at,
    make_call,
    read_blocks,
)

_NAME = re.compile(r"(?P<name>[^\s>]+)>")
_RECIPIENT = re.compile(r"(?:>>>)?(?P<name>[\w.-]+)\n")
_NEXT = re.compile(r">>>[\w.-]+\n")


def _function(text: str, at: int, tools: Schemas) -> ReadCalls | None:
    head = _NAME.match(text, at)
    found = None if head is None else json_at(text, head.end())
    call = None if head is None or found is None else make_call(head["name"], found[0])
    return None if call is None or found is None else ReadCalls([call], found[1])


def _read_recipients(text: str, tools: Schemas) -> ParsedCalls:
    kept: list[str] = []
    calls: list[RawCall] = []
    at = 0
    while at < len(text):
        head = _RECIPIENT.match(text, at)
        if head is None:
            return ParsedCalls(text, [], at > 0)
        if head["name"] == "all":
            following = _NEXT.search(text, head.end())
            at = len(text) if following is None else following.start()
            kept.append(text[head.end() : at])
            continue
        found = json_at(text, head.end())
        call = None if found is None or not tools else make_call(head["name"], found[0])
        if found is None or call is None:
            return ParsedCalls(text, [], at > 0 or text.startswith("{", head.end()))
        calls.append(call)
        at = found[1]
    return ParsedCalls("".join(kept), calls, False)


def _without_reasoning(text: str) -> ThinkingSplit:
    return ThinkingSplit(None, text, False)


FUNCTIONARY_31 = ToolFormat(
    name="functionary_v31",
    openings=("<function=",),
    read=partial(read_blocks, opening="<function=", closing="</function>", decode=_function),
)
FUNCTIONARY_32 = ToolFormat(
    name="functionary_v32", openings=(">>>",), read=_read_recipients, split=_without_reasoning, told=">>>${recipient}"
)
