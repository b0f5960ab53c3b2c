"""Lists of JSON calls after a marker: Phi-4-mini in two ways, Granite 3, Nemotron Nano 2, Hunyuan and Apriel."""

from __future__ import annotations

from functools import partial

from agentrl.tokens.formats.llama import LLAMA
from agentrl.tokens.parse import ParsedCalls, Schemas, ToolFormat, json_calls, read_blocks

_FUNCTOOLS = "functools"


def _read_functools(text: str, tools: Schemas) -> ParsedCalls:
    """Read what the prompt asks for, or the objects without a list as which the template writes earlier calls."""
    if _FUNCTOOLS + "[" in text:
        return read_blocks(text, tools, opening=_FUNCTOOLS, closing="", decode=json_calls)
    return LLAMA.read(text, tools)


PHI_4 = ToolFormat(
    name="phi_4",
    openings=("<|tool_call|>",),
    read=partial(read_blocks, opening="<|tool_call|>", closing="<|/tool_call|>", decode=json_calls),
)
GRANITE_3 = ToolFormat(
    name="granite_3",
    openings=("<|tool_call|>",),
    read=partial(read_blocks, opening="<|tool_call|>", closing="", decode=json_calls),
)
NEMOTRON_2 = ToolFormat(
    name="nemotron_2",
    openings=("<TOOLCALL>",),
    read=partial(read_blocks, opening="<TOOLCALL>", closing="</TOOLCALL>", decode=json_calls),
)
TOOL_CALLS = ToolFormat(
    name="tool_calls",
    openings=("<tool_calls>",),
    read=partial(read_blocks, opening="<tool_calls>", closing="</tool_calls>", decode=json_calls),
)
FUNCTOOLS = ToolFormat(
    name="functools",
    openings=(_FUNCTOOLS + "[",),
    starts=("{",),
    read=_read_functools,
    told=_FUNCTOOLS + "[",
)
