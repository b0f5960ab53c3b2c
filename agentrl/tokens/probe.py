"""Made-up conversations, to find out what a chat template does.

Invariant: every made-up text can be found again in what a template writes: it is digits that no text holds by chance.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence

from agentrl.errors import TokenError
from agentrl.tokens.guard import GuardedTemplate
from agentrl.tokens.template import PlainMessage

Roles = tuple[str, ...]
"""The roles of messages; an assistant message with tool calls is `call`."""

USUAL: tuple[Roles, ...] = (
    ("user",),
    ("tool",),
    ("tool", "tool"),
    ("tool", "user"),
    ("user", "assistant", "user"),
    ("user", "call", "tool"),
)
"""Shapes of new messages that every template is asked about."""


class Probe:
    """Makes up conversations for one template."""

    def __init__(self, *, text_arguments: bool) -> None:
        """Make up tool arguments as JSON text, or as values."""
        self.text = str(10**27 + secrets.randbelow(9 * 10**27))
        """The text of the last assistant message, or of its last tool call."""
        self._text_arguments = text_arguments

    def mark(self, at: int) -> str:
        """Return the text of message `at` of `messages`."""
        return f"{self.text[::-1]}{at:06d}"

    def messages(self, roles: Roles) -> list[PlainMessage]:
        """Return messages of these roles, each with its own text."""
        messages: list[PlainMessage] = []
        for at, role in enumerate(roles):
            mark = self.mark(at)
            if role == "call":
                count = leading_results(roles[at + 1 :])
                messages.append({"role": "assistant", "content": None, "tool_calls": self._calls(max(1, count), mark)})
            else:
                messages.append({"role": role, "content": mark})
                if role == "tool":
                    messages[-1]["tool_call_id"] = f"call0000{leading_results(roles[:at][::-1]) % 10}"
        return messages

    def base(self, calls: int) -> list[PlainMessage]:
        """Return the shortest conversation that ends with an assistant message, with `calls` tool calls."""
        return [question(), self.assistant(calls)]

    def assistant(self, calls: int) -> PlainMessage:
        """Return an assistant message with `calls` tool calls, or else with text."""
        if calls == 0:
            return {"role": "assistant", "content": self.text}
        return {"role": "assistant", "content": None, "tool_calls": self._calls(calls, self.text)}

    def histories(self, calls: int, tools: bool) -> list[list[PlainMessage]]:
        """Return conversations that end with `assistant(calls)`, without and with reasoning."""
        last = self.assistant(calls)
        thinking: PlainMessage = {"reasoning_content": "r", "thinking": "r"}
        earlier: list[Roles] = [("system", "user", "assistant", "user"), ("user", "assistant", "user", "assistant", "user")]
        if tools:
            earlier += [("user", "call", "tool"), ("system", "user", "call", "tool", "tool", "assistant", "user")]
        histories: list[list[PlainMessage]] = []
        for before in (("user",), *earlier):
            messages = self.messages(before)
            histories.append([*messages, last])
            thought = [{**m, **thinking} if m["role"] == "assistant" else m for m in messages]
            histories.append([*thought, {**last, **thinking}])
        return histories

    def _calls(self, count: int, mark: str) -> list[dict[str, object]]:
        calls: list[dict[str, object]] = []
        for at in range(count):
            arguments: object = {"x": mark if at == count - 1 else "y"}
            arguments = json.dumps(arguments) if self._text_arguments else arguments
            function: dict[str, object] = {"name": "f", "arguments": arguments}
            calls.append({"type": "function", "function": function, "id": f"call0000{at % 10}"})
        return calls


def leading_results(roles: Roles) -> int:
    """Return how many tool results `roles` begins with."""
    return next((at for at, role in enumerate(roles) if role != "tool"), len(roles))


def roles_of(messages: Sequence[PlainMessage]) -> Roles:
    """Return the roles of messages."""
    return tuple(["call" if message.get("tool_calls") else str(message["role"]) for message in messages])


def question() -> PlainMessage:
    """Return a user message."""
    return {"role": "user", "content": "q"}


def stub(name: str) -> Mapping[str, object]:
    """Return the schema of a tool."""
    properties = {"x": {"type": "string", "description": "d"}}
    parameters: dict[str, object] = {"type": "object", "properties": properties, "required": ["x"]}
    return {"type": "function", "function": {"name": name, "description": "d", "parameters": parameters}}


def wants_text_arguments(template: GuardedTemplate) -> bool:
    """Return whether a template needs tool arguments as JSON text: it breaks on a value, and not on text."""
    for arguments in ({"x": "y"}, '{"x": "y"}'):
        call = {"type": "function", "id": "call00000", "function": {"name": "f", "arguments": arguments}}
        messages: list[PlainMessage] = [
            question(),
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": "z", "tool_call_id": "call00000"},
        ]
        try:
            template.render(messages, [stub("f")], generation_prompt=True)
        except TokenError:
            continue
        return isinstance(arguments, str)
    return False
