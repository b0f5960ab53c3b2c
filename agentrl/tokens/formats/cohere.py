"""Cohere's Command R7B and later: an output is reasoning, then a list of calls or the answer, each between tags.

`<|START_THINKING|>...<|END_THINKING|><|START_ACTION|>[{"tool_call_id": "0", "tool_name": ..., "parameters": {...}}]`
"""

from __future__ import annotations

from functools import partial
from typing import cast

from agentrl.tokens.parse import ParsedCalls, RawCall, Schemas, ThinkingSplit, ToolFormat, json_calls, make_call, read_blocks

_THINKING, _THOUGHT = "<|START_THINKING|>", "<|END_THINKING|>"
_ACTION, _ACTED = "<|START_ACTION|>", "<|END_ACTION|>"
_RESPONSE, _RESPONDED = "<|START_RESPONSE|>", "<|END_RESPONSE|>"


def _action(value: object) -> RawCall | None:
    if not isinstance(value, dict):
        return None
    fields = cast("dict[str, object]", value)
    return make_call(fields.get("tool_name"), fields.get("parameters"))


def _without_thinking(text: str) -> ThinkingSplit:
    body = text.lstrip().removeprefix(_THINKING)
    reasoning, closed, rest = body.partition(_THOUGHT)
    if closed:
        return ThinkingSplit(reasoning or None, rest, False)
    if text.lstrip().startswith(_THINKING):
        return ThinkingSplit(body or None, "", True)
    return ThinkingSplit(None, text, False)


def _read_actions(text: str, tools: Schemas) -> ParsedCalls:
    decode = partial(json_calls, read_one=_action)
    parsed = (
        read_blocks(text, tools, opening=_ACTION, closing=_ACTED, decode=decode) if tools else ParsedCalls(text, [], False)
    )
    if _RESPONSE not in parsed.content:
        return parsed
    before, _, answer = parsed.content.partition(_RESPONSE)
    return parsed._replace(content=before + answer.removesuffix(_RESPONDED))


COHERE = ToolFormat(name="cohere", openings=(_ACTION,), read=_read_actions, split=_without_thinking)
