"""Mistral: a list of JSON calls after `[TOOL_CALLS]`, or, from tokenizer v11 on, `[TOOL_CALLS]NAME[ARGS]{...}` a call."""

from __future__ import annotations

import re
from functools import partial

from agentrl.tokens.formats.sections import SectionGrammar
from agentrl.tokens.parse import ToolFormat, json_calls, read_blocks

_OPENING = "[TOOL_CALLS]"
_THINKING = "[THINK]", "[/THINK]"
_V11 = SectionGrammar(
    opening=_OPENING,
    closing="",
    head=re.compile(r"(?P<name>[^\s\[\]{}]+)(?:\[CALL_ID\][^\s\[\]{}]*)?\[ARGS\]"),
    tail=re.compile(""),
)

MISTRAL = ToolFormat(
    name="mistral",
    openings=(_OPENING,),
    read=partial(read_blocks, opening=_OPENING, closing="", decode=json_calls),
    thinking=_THINKING,
)
MISTRAL_V11 = ToolFormat(name="mistral_v11", openings=(_OPENING,), read=_V11.read, thinking=_THINKING)
