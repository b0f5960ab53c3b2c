"""Qwen3-Coder, Qwen3.5 and later, Nemotron 3: `<tool_call><function=NAME><parameter=KEY>`, a value on lines of its own."""

from __future__ import annotations

import re

from agentrl.tokens.formats.tagged import TagGrammar
from agentrl.tokens.parse import ToolFormat

_TAGS = TagGrammar(
    opening="<tool_call>",
    closing="</tool_call>",
    head=re.compile(r"<function=(?P<name>[^>\n]+)>"),
    tail="</function>",
    key=re.compile(r"<parameter=(?P<key>[^>\n]+)>"),
    next_key="<parameter=",
    close="</parameter>",
    on_lines=True,
)

QWEN_CODER = ToolFormat(name="qwen_coder", openings=("<tool_call>",), read=_TAGS.read)
