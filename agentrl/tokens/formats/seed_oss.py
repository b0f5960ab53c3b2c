"""Seed-OSS: `<seed:tool_call><function=NAME><parameter=KEY>`."""

from __future__ import annotations

import re

from agentrl.tokens.formats.tagged import TagGrammar
from agentrl.tokens.parse import ToolFormat

_TAGS = TagGrammar(
    opening="<seed:tool_call>",
    closing="</seed:tool_call>",
    head=re.compile(r"<function=(?P<name>[^>\n]+)>"),
    tail="</function>",
    key=re.compile(r"<parameter=(?P<key>[^>\n]+)>"),
    next_key="<parameter=",
    close="</parameter>",
)

SEED_OSS = ToolFormat(
    name="seed_oss",
    openings=("<seed:tool_call>",),
    read=_TAGS.read,
    thinking=("<seed:think>", "</seed:think>"),
)
