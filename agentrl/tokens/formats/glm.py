"""GLM-4.5 and later: `<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>`."""

from __future__ import annotations

import re

from agentrl.tokens.formats.tagged import TagGrammar
from agentrl.tokens.parse import ToolFormat

_TAGS = TagGrammar(
    opening="<tool_call>",
    closing="</tool_call>",
    head=re.compile(r"(?P<name>[^\s<{\"]+)"),
    tail="",
    key=re.compile(r"<arg_key>(?P<key>[^<\n]+)</arg_key>\s*<arg_value>"),
    next_key="<arg_key>",
    close="</arg_value>",
)

GLM = ToolFormat(name="glm", openings=("<tool_call>",), read=_TAGS.read)
