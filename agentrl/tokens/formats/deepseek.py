"""DeepSeek: V3 and R1 write a block of JSON code after the name, V3.1 the JSON alone, V3.2 and later tags."""

from __future__ import annotations

import re

from agentrl.tokens.formats.sections import SectionGrammar
from agentrl.tokens.formats.tagged import TagGrammar
from agentrl.tokens.parse import ParsedCalls, Schemas, ToolFormat

_OPENING, _CLOSING = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"

_V3 = SectionGrammar(
    opening=_OPENING,
    closing=_CLOSING,
    head=re.compile(r"<｜tool▁call▁begin｜>function<｜tool▁sep｜>(?P<name>[^\n<]+)\n```json\n"),
    tail=re.compile(r"\s*```\s*<｜tool▁call▁end｜>"),
)
_V31 = SectionGrammar(
    opening=_OPENING,
    closing=_CLOSING,
    head=re.compile(r"<｜tool▁call▁begin｜>(?P<name>[^\n<]+)<｜tool▁sep｜>"),
    tail=re.compile(r"\s*<｜tool▁call▁end｜>"),
)


def _dsml_tags(block: str) -> TagGrammar:
    return TagGrammar(
        opening=f"<｜DSML｜{block}>",
        closing=f"</｜DSML｜{block}>",
        head=re.compile(r'<｜DSML｜invoke name="(?P<name>[^"\n]+)">'),
        tail="</｜DSML｜invoke>",
        key=re.compile(r'<｜DSML｜parameter name="(?P<key>[^"\n]+)" string="(?P<string>true|false)">'),
        next_key="<｜DSML｜parameter name=",
        close="</｜DSML｜parameter>",
        many=True,
    )


_V32, _V4 = _dsml_tags("function_calls"), _dsml_tags("tool_calls")


def _read_dsml(text: str, tools: Schemas) -> ParsedCalls:
    return (_V32 if _V32.opening in text else _V4).read(text, tools)


DEEPSEEK_V3 = ToolFormat(name="deepseek_v3", openings=(_OPENING,), read=_V3.read)
DEEPSEEK_V31 = ToolFormat(name="deepseek_v31", openings=(_OPENING,), read=_V31.read)
DEEPSEEK_V32 = ToolFormat(name="deepseek_v32", openings=(_V32.opening, _V4.opening), read=_read_dsml)
