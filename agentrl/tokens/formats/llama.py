"""Llama 3 as JSON: a message that is one or more `{"name": ..., "parameters": {...}}`, after an optional tag."""

from __future__ import annotations

from agentrl.tokens.parse import ParsedCalls, RawCall, Schemas, ToolFormat, call_of, json_at, skip_space

_TAG = "<|python_tag|>"


def _read_objects(text: str, tools: Schemas) -> ParsedCalls:
    body = text.strip().removeprefix(_TAG).strip()
    if not body.startswith("{"):
        return ParsedCalls(text, [], _TAG in text)
    calls: list[RawCall] = []
    at = 0
    while at < len(body):
        found = json_at(body, at)
        call = None if found is None else call_of(found[0])
        if found is None or call is None:
            return ParsedCalls(text, [], '"name"' in body)
        calls.append(call)
        at = skip_space(body, found[1], ";, \n\t")
    return ParsedCalls("", calls, False)


LLAMA = ToolFormat(name="llama", openings=(_TAG,), starts=("{", _TAG), read=_read_objects)
