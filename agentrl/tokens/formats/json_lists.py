"""Lists of JSON calls after a marker: Phi-4-mini, Granite 3, Nemotron Nano 2."""

from __future__ import annotations

from functools import partial

from agentrl.tokens.parse import ToolFormat, json_calls, read_blocks

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
