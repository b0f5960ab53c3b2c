"""Responses as they are written: their items, and the object around them.

Invariant: ids come from the answer's id, so an answer gets the same items whether it is streamed or not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, cast

from agentrl.client.backend import Answer
from agentrl.tokens.messages import ToolCallFields
from agentrl_doors.gateway.dialect import DialectCall
from agentrl_doors.gateway.dialects.answers import Counts, argument_text, call_id, said
from agentrl_doors.gateway.dialects.response_items import sealed
from agentrl_doors.gateway.dialects.response_tools import ToolName, custom_input, read_tools

_ECHOED: Final = ("instructions", "max_output_tokens", "max_tool_calls", "previous_response_id", "prompt_cache_key")
_ECHOED_OR: Final[Mapping[str, object]] = {
    "metadata": {},
    "parallel_tool_calls": True,
    "temperature": None,
    "top_p": None,
    "tool_choice": "auto",
    "tools": [],
    "reasoning": None,
    "text": {"format": {"type": "text"}},
    "truncation": "disabled",
    "store": True,
}


def response_id(answer_id: str) -> str:
    """Return the id of the response that an answer is."""
    return f"resp_{answer_id}"


def response_body(call: DialectCall, identity: str, *, created: int) -> dict[str, object]:
    """Return a response that has no output yet."""
    body = call.body
    return {
        "id": identity,
        "object": "response",
        "created_at": created,
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "model": call.model or "policy",
        "output": [],
        "usage": None,
        **{name: body.get(name) for name in _ECHOED},
        **{name: default if body.get(name) is None else body[name] for name, default in _ECHOED_OR.items()},
    }


def ended(body: Mapping[str, object], answer: Answer, output: Sequence[Mapping[str, object]]) -> dict[str, object]:
    """Return a response with its output: completed, or incomplete where the limit of tokens cut it."""
    parts = said(answer)
    status = "incomplete" if parts.truncated else "completed"
    details = {"reason": "max_output_tokens"} if parts.truncated else None
    return {
        **body,
        "model": answer.model,
        "status": status,
        "incomplete_details": details,
        "output": output,
        "usage": _response_usage(parts.counts),
    }


def _response_usage(counts: Counts) -> dict[str, object]:
    return {
        "input_tokens": counts.prompt,
        "input_tokens_details": {"cached_tokens": counts.cached, "cache_write_tokens": 0},
        "output_tokens": counts.sampled,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": counts.prompt + counts.sampled,
    }


def wants_summary(call: DialectCall) -> bool:
    """Return whether a call asks for reasoning as a summary; else it is content."""
    reasoning = call.body.get("reasoning")
    fields = cast("Mapping[str, object]", reasoning) if isinstance(reasoning, Mapping) else {}
    return any(fields.get(name) not in (None, "none") for name in ("summary", "generate_summary"))


def output_items(call: DialectCall, answer: Answer, answer_id: str) -> list[dict[str, object]]:
    """Return the items of an answer; an answer without text, reasoning and calls has an empty message."""
    parts = said(answer)
    items: list[dict[str, object]] = []
    if parts.reasoning:
        items.append(reasoning_item(call, answer_id, parts.reasoning))
    if parts.content or (not items and not parts.calls):
        items.append(message_item(answer_id, parts.content, truncated=parts.truncated, logprobs=text_logprobs(answer)))
    names = read_tools(call.body.get("tools")).names if parts.calls else {}
    for index, tool_call in enumerate(parts.calls):
        items.append(_call_item(answer_id, index, tool_call, call_id(answer, index, tool_call), names))
    return items


def reasoning_item(call: DialectCall, answer_id: str, text: str) -> dict[str, object]:
    """Return the item of reasoning; its encrypted form is there where the call includes it."""
    item: dict[str, object] = {"type": "reasoning", "id": f"rs_{answer_id}", "summary": [], "status": "completed"}
    if wants_summary(call):
        item["summary"] = [{"type": "summary_text", "text": text}]
    else:
        item["content"] = [{"type": "reasoning_text", "text": text}]
    included = call.body.get("include")
    if isinstance(included, list) and "reasoning.encrypted_content" in included:
        item["encrypted_content"] = sealed(text)
    return item


def message_item(
    answer_id: str, text: str, *, truncated: bool, logprobs: Sequence[Mapping[str, object]] = ()
) -> dict[str, object]:
    """Return the item of text."""
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}
    status = "incomplete" if truncated else "completed"
    return {"type": "message", "id": f"msg_{answer_id}", "role": "assistant", "status": status, "content": [part]}


def text_logprobs(answer: Answer) -> list[dict[str, object]]:
    """Return the log-probs of all sampled tokens; none where the call does not ask for them."""
    entries = cast("list[dict[str, object]]", (answer.logprobs or {}).get("content") or [])
    shown = ("token", "bytes", "logprob", "top_logprobs")
    return [{name: entry.get(name) or ([] if name == "bytes" else entry.get(name)) for name in shown} for entry in entries]


def _call_item(
    answer_id: str, index: int, call: ToolCallFields, identity: str, names: Mapping[str, ToolName]
) -> dict[str, object]:
    tool, arguments = names.get(call.name, ToolName(call.name)), argument_text(call)
    item: dict[str, object] = {"call_id": identity, "name": tool.name}
    if tool.namespace is not None:
        item["namespace"] = tool.namespace
    if tool.custom:
        return {"type": "custom_tool_call", "id": f"ctc_{answer_id}_{index}", **item, "input": custom_input(arguments)}
    named = {"type": "function_call", "id": f"fc_{answer_id}_{index}", "status": "completed"}
    return {**named, **item, "arguments": arguments}
