"""Demands on an answer that decoding cannot enforce: structured output and forced tool calls, by prompt.

Invariant: a demand adds text to the prompt and changes nothing about sampling, so recorded log-probs stay those of the
policy. An answer that misses the demand is returned as it is.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from agentrl.client.json_schema import misfit
from agentrl.client.schema_problem import schema_problem
from agentrl.errors import WorkflowError
from agentrl.tokens.history import MessageReader, next_prefix
from agentrl.tokens.messages import calls_of, field_getter, message_key, role_of
from agentrl.types import Message

ToolSchema = Mapping[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """The demand on one answer."""

    json: bool = False
    """Its text is a JSON value, unless it calls tools."""
    schema: Mapping[str, Any] | None = None
    """The schema of that value; None: any object."""
    calls: bool = False
    """It calls a tool."""
    tool: str | None = None
    """Every call is of this tool; None: of any."""
    one_call: bool = False
    """It calls one tool at most."""
    may_call: bool = False
    """The request has tools."""

    @property
    def instruction(self) -> str:
        """The sentences that are added to the prompt."""
        said: list[str] = []
        if self.json:
            start = "Unless you call a tool, answer" if self.may_call and not self.calls else "Answer"
            if self.schema is None:
                said.append(f"{start} with one JSON object and no other text.")
            else:
                text = json.dumps(self.schema, ensure_ascii=False, separators=(",", ":"))
                said.append(f"{start} with JSON and no other text. It must fit this JSON schema:\n{text}")
        if self.calls:
            said.append("Answer with a tool call." if self.tool is None else f"Answer with a call of the tool {self.tool}.")
        if self.one_call:
            said.append("Call at most one tool in your answer.")
        return "\n".join(said)

    def problem(self, message: Message) -> str:
        """Return how an answer misses the demand; "" if it does not.

        Example:
            >>> Demand(json=True).problem({"role": "assistant", "content": "[1]"})
            'expected a JSON object, got [1]'
        """
        names = [call.name for call in calls_of(message)]
        if self.calls and not names:
            return "expected a tool call, got text"
        if self.tool is not None and (other := [name for name in names if name != self.tool]):
            return f"expected a call of {self.tool}, got a call of {other[0]}"
        if self.one_call and len(names) > 1:
            return f"expected at most one tool call, got {len(names)}"
        if not self.json or names:
            return ""
        text = str(message.get("content") or "")
        try:
            value: object = json.loads(text)
        except (ValueError, RecursionError) as error:
            return f"expected JSON, got {text[:80]!r}: {error}"
        if self.schema is None:
            return "" if isinstance(value, dict) else f"expected a JSON object, got {value!r:.80}"
        return misfit(value, self.schema)


def read_demand(given: Mapping[str, object], tools: Sequence[ToolSchema] | None) -> Demand | None:
    """Return what a call demands with `response_format`, `tool_choice` and `parallel_tool_calls`; None if nothing."""
    wants_json, schema = _read_format(given.get("response_format"))
    calls, tool = _read_choice(given.get("tool_choice", "auto"), tools)
    one_call = given.get("parallel_tool_calls", True) is False and bool(tools)
    if not (wants_json or calls or one_call):
        return None
    return Demand(json=wants_json, schema=schema, calls=calls, tool=tool, one_call=one_call, may_call=bool(tools))


def _read_format(form: object) -> tuple[bool, Mapping[str, Any] | None]:
    fields = cast("Mapping[str, object]", form) if isinstance(form, Mapping) else {}
    kind = fields.get("type")
    if form is None or kind == "text":
        return False, None
    if kind == "json_object":
        return True, None
    if kind != "json_schema":
        raise _wrong("response_format", form, "its type must be text, json_object or json_schema")
    inner = fields.get("json_schema")
    schema = cast("Mapping[str, object]", inner).get("schema") if isinstance(inner, Mapping) else None
    if not isinstance(schema, Mapping):
        raise _wrong("response_format", form, 'expected {"type": "json_schema", "json_schema": {"name", "schema"}}')
    problem = schema_problem(cast("object", schema))
    if problem:
        raise _wrong("response_format", schema, f"the schema cannot be checked: {problem}")
    return True, cast("Mapping[str, Any]", schema)


def _read_choice(choice: object, tools: Sequence[ToolSchema] | None) -> tuple[bool, str | None]:
    if choice in ("auto", "none"):
        return False, None
    names = [cast("Mapping[str, object]", tool["function"])["name"] for tool in tools or ()]
    if not names:
        raise _wrong("tool_choice", choice, "the call has no tools")
    if choice == "required":
        return True, None
    function = field_getter(choice)("function") if isinstance(choice, Mapping) else None
    name = field_getter(function)("name") if isinstance(function, Mapping) else None
    if name not in names:
        raise _wrong("tool_choice", choice, f"use auto, none, required, or name one of the tools {names}")
    return True, cast("str", name)


def _wrong(name: str, value: object, why: str) -> WorkflowError:
    return WorkflowError(f"model call: {name}={value!r:.80} is wrong: {why}")


class Instructions:
    """The instructions that the prompts of one episode carry.

    An answer's history is what the model saw: where a request repeats an answer that was asked for with an instruction, the
    instruction stands before it again. So later turns continue earlier ones exactly and fork no more than without demands.
    """

    def __init__(self) -> None:
        self._reader = MessageReader()
        self._by_answer: dict[bytes, str] = {}
        """The instruction of each recorded answer, by the digest of the workflow's conversation up to that answer."""

    def applied(self, messages: Sequence[Message], demand: Demand | None) -> Sequence[Message]:
        """Return the messages that are rendered for a request of a workflow."""
        if demand is None and not self._by_answer:
            return messages
        rendered: list[Message] = []
        for message, prefix in zip(messages, self._reader.read(messages).prefixes, strict=True):
            instruction = self._by_answer.get(prefix)
            if instruction is not None:
                rendered = _with_instruction(rendered, instruction)
            rendered.append(message)
        return rendered if demand is None else _with_instruction(rendered, demand.instruction)

    def remember(self, messages: Sequence[Message], demand: Demand, answer: Message) -> None:
        """Remember the instruction of the request `messages`, which was answered by `answer`."""
        request = self._reader.read(messages).prefixes[-1]
        self._by_answer[next_prefix(request, message_key(answer).digest)] = demand.instruction


def _with_instruction(messages: Sequence[Message], instruction: str) -> list[Message]:
    """Return messages with an instruction at their end.

    It becomes part of a last message of the user or the system; after any other it is a message of the user.
    """
    last = messages[-1]
    if role_of(last) not in ("user", "system", "developer"):
        return [*messages, {"role": "user", "content": instruction}]
    get = field_getter(last)
    content = get("content")
    if isinstance(content, str) or content is None:
        content = f"{content}\n\n{instruction}" if content else instruction
    else:
        content = [*content, {"type": "text", "text": f"\n\n{instruction}"}]
    changed: dict[str, Any] = {"role": get("role"), "content": content}
    if get("name") is not None:
        changed["name"] = get("name")
    return [*messages[:-1], changed]
