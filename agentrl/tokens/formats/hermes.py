"""Hermes, Qwen2.5 to Qwen3, Granite 4: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.

Also the form in which tools are described to a model whose template has none.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial

from agentrl.tokens.parse import ToolFormat, ToolWriter, json_call, read_blocks

_DESCRIPTION = """\
You may call these functions. Each line describes one, as JSON:
<tools>
{tools}
</tools>

To call a function, write its name and its arguments as JSON between these tags, once for each call:
<tool_call>
{"name": "the name", "arguments": {"the argument": "its value"}}
</tool_call>
The results come back between <tool_response> and </tool_response>."""


def _write_hermes(calls: Sequence[tuple[str, Mapping[str, object]]]) -> str:
    texts = [json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False) for name, arguments in calls]
    return "\n".join(f"<tool_call>\n{text}\n</tool_call>" for text in texts)


HERMES = ToolFormat(
    name="hermes",
    openings=("<tool_call>",),
    read=partial(read_blocks, opening="<tool_call>", closing="</tool_call>", decode=json_call),
    write=_write_hermes,
    sign='<tool_call>\n{"name": <',
    writer=ToolWriter(description=_DESCRIPTION, result=("<tool_response>\n", "\n</tool_response>")),
)
