"""Lists of JSON calls, most after a marker: Phi-4-mini in two ways, Granite 3, Nemotron 2, Hunyuan, Apertus, xLAM."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from typing import cast

from agentrl.tokens.formats.llama import LLAMA
from agentrl.tokens.parse import (
    ParsedCalls,
    RawCall,
    ReadCalls,
    Schemas,
    ToolFormat,
    json_call,
    json_calls,
    make_call,
    read_blocks,
)

_FUNCTOOLS = "functools"


def _read_functools(text: str, tools: Schemas) -> ParsedCalls:
    """Read what the prompt asks for, or the objects without a list as which the template writes earlier calls."""
    if _FUNCTOOLS + "[" in text:
        return read_blocks(text, tools, opening=_FUNCTOOLS, closing="", decode=json_calls)
    return LLAMA.read(text, tools)


def _write_granite(calls: Sequence[tuple[str, Mapping[str, object]]]) -> str:
    listed = [{"name": name, "arguments": arguments} for name, arguments in calls]
    return f"<|tool_call|>{json.dumps(listed, ensure_ascii=False)}"


def _list_or_object(text: str, at: int, tools: Schemas) -> ReadCalls | None:
    return json_calls(text, at, tools) or json_call(text, at, tools)


def _arguments_by_name(value: object) -> RawCall | None:
    """Read `{"NAME": {...}}`."""
    if not isinstance(value, dict) or len(fields := cast("dict[str, object]", value)) != 1:
        return None
    [(name, arguments)] = fields.items()
    return make_call(name, arguments)


def _read_list(text: str, tools: Schemas) -> ParsedCalls:
    body = text.strip()
    found = json_calls(body, 0, tools)
    if found is None or found.end != len(body):
        return ParsedCalls(text, [], body.startswith("[") and '"name"' in body)
    return ParsedCalls("", found.calls, False)


PHI_4 = ToolFormat(
    name="phi_4",
    openings=("<|tool_call|>",),
    read=partial(read_blocks, opening="<|tool_call|>", closing="<|/tool_call|>", decode=_list_or_object),
)
GRANITE_3 = ToolFormat(
    name="granite_3",
    openings=("<|tool_call|>",),
    read=partial(read_blocks, opening="<|tool_call|>", closing="", decode=json_calls),
    write=_write_granite,
    sign="only with <|tool_call|> followed by",
)
NEMOTRON_2 = ToolFormat(
    name="nemotron_2",
    openings=("<TOOLCALL>",),
    read=partial(read_blocks, opening="<TOOLCALL>", closing="</TOOLCALL>", decode=json_calls),
)
APERTUS = ToolFormat(
    name="apertus",
    openings=("<|tools_prefix|>",),
    read=partial(
        read_blocks,
        opening="<|tools_prefix|>",
        closing="<|tools_suffix|>",
        decode=partial(json_calls, read_one=_arguments_by_name),
    ),
)
XLAM = ToolFormat(name="xlam", openings=(), starts=("[",), read=_read_list)
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
