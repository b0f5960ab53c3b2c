"""Kimi K2: a section of calls, each with an id, `functions.NAME:NUMBER`, which names the tool."""

from __future__ import annotations

import re

from agentrl.tokens.formats.sections import SectionGrammar
from agentrl.tokens.parse import ToolFormat

_SECTION = SectionGrammar(
    opening="<|tool_calls_section_begin|>",
    closing="<|tool_calls_section_end|>",
    head=re.compile(r"<\|tool_call_begin\|>\s*(?P<id>functions\.(?P<name>[^\s<:]+):\d+)\s*<\|tool_call_argument_begin\|>"),
    tail=re.compile(r"\s*<\|tool_call_end\|>"),
)


def _kimi_id(name: str, number: int) -> str:
    return f"functions.{name}:{number}"


KIMI_K2 = ToolFormat(name="kimi_k2", openings=(_SECTION.opening,), read=_SECTION.read, call_id=_kimi_id)
