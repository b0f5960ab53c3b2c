"""What a template writes between one model output and the next: found by probing, rendered from the new messages only.

A template is *local* for a shape of new messages (their roles) if the text it writes for them does not depend on what
came before. That is checked by rendering made-up conversations, once per shape, and remembered. For a local shape the text
is cut out of a two-message conversation followed by the new messages, so a turn costs what is new. Otherwise the whole
conversation is rendered.

Invariant: `DeltaRenderer.render` returns the text from the end of the last assistant message, that message's closing
included, to the point where the model writes; it is the text the template writes there for the whole conversation.

Made-up conversations, to find out what a chat template does.

Invariant: every made-up text can be found again in what a template writes: it is digits that no text holds by chance.
"""

from __future__ import annotations

import itertools
import json
import secrets
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from agentrl.errors import TokenError
from agentrl.tokens.parse import THINK_OPEN
from agentrl.tokens.template.environment import ChatTemplate, PlainMessage
from agentrl.tokens.template.guard import GuardedTemplate, Rendered, Tools
from agentrl.tokens.template.trace import Trace, TracingEnvironment, Untraceable

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


class Shape(NamedTuple):
    """What probing a template has shown for one shape of new messages."""

    local: bool
    """The text for the new messages does not depend on the conversation before them."""
    complete: bool
    """Every new message appears after the last assistant message, in order."""
    uses_tools: bool
    """The text for the new messages depends on the tools, or on whether there are any."""
    rewrites: bool
    """The template now writes something else for messages before the last assistant message's end."""
    rewrites_thinking: bool
    """The same, where earlier messages carry reasoning."""


class DeltaRenderer:
    """Renders new messages after a model output; immutable but for a bounded memory of probed shapes."""

    def __init__(self, template: GuardedTemplate, probe: Probe, *, ends: Sequence[str], controls: Sequence[str]) -> None:
        """Probe the template.

        Args:
            template: the guarded template.
            probe: makes up conversations.
            ends: texts of the end-of-sequence tokens.
            controls: texts of all control tokens.
        """
        self._template = template
        self._probe = probe
        self._ends = tuple(ends)
        self._plain_tail = self._split(probe.base(0), None, generation_prompt=False)[1]
        starts = [(self._plain_tail.find(text), -len(text), text) for text in controls if text in self._plain_tail]
        self.end_of_turn: str | None = min(starts)[2] if starts else None
        """The token text that ends an assistant message; None if the template writes none."""
        if self.end_of_turn is not None:
            self._ends = (*self._ends, self.end_of_turn)
        self.shape = lru_cache(maxsize=256)(self._shape)
        self.shows = lru_cache(maxsize=64)(self._shows)
        self._rest = lru_cache(maxsize=64)(self._text_after_calls)
        self._tracing: tuple[ChatTemplate, TracingEnvironment] | None = None
        self.renders_tools = self._sees_tools()
        """Whether the template shows the tools to the model."""

    def render(
        self, history: Sequence[PlainMessage], new: Sequence[PlainMessage], tools: Tools, *, generation_prompt: bool = True
    ) -> Rendered:
        """Return the text after the last assistant message of `history`.

        Args:
            history: the messages before, ending with the assistant message; read only if the shape is not local.
            new: the messages after it.
            tools: the tools of the request.
            generation_prompt: whether the text ends where the model starts to write.

        Raises:
            TokenError: if the template refuses the messages, or leaves out one of them here (see `Shape.complete`).
        """
        roles = roles_of(new)
        shape = self.shape(roles, bool(tools))
        if not shape.complete:
            raise TokenError(f"the chat template does not write new messages {roles} after the earlier ones")
        calls = leading_results(roles)
        before = self._probe.base(calls) if shape.local else [*history[:-1], self._probe.assistant(calls)]
        _name_calls(before, new)
        shown = tools if shape.uses_tools or not shape.local else None
        rendered = self._template.render([*before, *new], shown, generation_prompt=generation_prompt)
        return Rendered(self._after(rendered.text, roles, bool(shown))[1], rendered.nonce)

    def trace(self, trace: Trace, new: Sequence[PlainMessage], tools: bool) -> str:
        """Return what `render` returns for messages with traced texts, if their text depends on nothing else.

        Raises:
            Untraceable: it does, or the template does something with them that cannot be followed.
            TokenError: the template cannot write them.
            ConfigError: it cannot be compiled for tracing.
        """
        roles = roles_of(new)
        shape = self.shape(roles, tools)
        if not shape.local or not shape.complete or shape.uses_tools:
            raise Untraceable
        if self._tracing is None:
            environment = TracingEnvironment()
            self._tracing = self._template.template.within(environment), environment
        template, environment = self._tracing
        before = self._probe.base(leading_results(roles))
        _name_calls(before, new)
        skipped, text = self._after(template.render([*before, *new], None, generation_prompt=True), roles, False)
        if len(trace.split(skipped)) > 1 or environment.passing in text:
            raise Untraceable
        return text

    def _after(self, text: str, roles: Roles, tools: bool) -> tuple[str, str]:
        """Return what stands between the probe text and the end of its message, and all that follows."""
        _, found, tail = text.partition(self._probe.text)
        at = self._closing_at(tail, leading_results(roles), tools) if found else -1
        if at < 0:
            raise TokenError(f"the chat template mixes new messages {roles} with the earlier ones")
        return tail[:at], tail[at:]

    def _shows(self, role: str) -> bool:
        """Return whether the template writes messages of a role (`call`: tool calls) anywhere in a conversation."""
        refused = True
        shown: tuple[Tools, Tools] = (None, [stub("f")])
        befores: tuple[Roles, ...] = ((), ("user",), ("user", "assistant"), ("user", "call"))
        for before, after, tools in itertools.product(befores, ((), ("user",)), shown):
            messages = self._probe.messages((*before, role, *after))
            try:
                text = self._template.render(messages, tools, generation_prompt=True).text
            except TokenError:
                continue
            refused = False
            if self._probe.mark(len(before)) in text:
                return True
        return refused  # the template itself will refuse it, with a better message

    def text_prefix_preserving(self) -> bool:
        """Return whether the template only ever adds text at the end, for the usual shapes of new messages."""
        return all(shape.complete and not shape.rewrites for shape in self._standard_shapes())

    def local(self) -> bool:
        """Return whether the template is local for the usual shapes of new messages."""
        return all(shape.local and shape.complete for shape in self._standard_shapes())

    def _standard_shapes(self) -> list[Shape]:
        shapes: list[Shape] = []
        for tools in (False, True):
            for roles in USUAL:
                if tools or not {"tool", "call"} & set(roles):
                    try:
                        shapes.append(self.shape(roles, tools))
                    except TokenError:  # the template has no such conversations
                        continue
        return shapes

    def _sees_tools(self) -> bool:
        try:
            texts = [self._template.render([question()], [stub(name)], generation_prompt=True).text for name in ("f", "g")]
        except TokenError:
            return False
        return texts[0] != texts[1]

    def _closing_at(self, tail: str, calls: int, tools: bool) -> int:
        """Return where, after the probe text, the end of the assistant message begins; -1 if it is not there."""
        ends = [at for text in self._ends if text and (at := tail.find(text)) >= 0]
        if ends:
            return min(ends)
        rest = self._rest(calls, tools)
        return len(rest) if tail.startswith(rest) else -1

    def _text_after_calls(self, calls: int, tools: bool) -> str:
        """Return what a template without end-of-turn token writes between the probe text and the end of the message."""
        if calls == 0:
            return ""
        _, tail = self._split(self._probe.base(calls), [stub("f")] if tools else None, generation_prompt=False)
        return tail.removesuffix(self._plain_tail)

    def _split(self, messages: list[PlainMessage], tools: Tools, *, generation_prompt: bool) -> tuple[str, str]:
        text = self._template.render(messages, tools, generation_prompt=generation_prompt).text
        front, found, tail = text.partition(self._probe.text)
        if not found:
            raise TokenError("the chat template does not write the text of assistant messages")
        return front, tail

    def _shape(self, roles: Roles, tools: bool) -> Shape:
        new = self._probe.messages(roles)
        calls = leading_results(roles)
        shown = [stub("f")] if tools else None
        base = self._probe.base(calls)
        _, tail = self._split([*base, *new], shown, generation_prompt=True)
        places = [tail.find(self._probe.mark(at)) for at in range(len(new))]
        complete = -1 not in places and places == sorted(places)
        uses_tools = tools and not tail == self._tail(base, new, None) == self._tail(base, new, [stub("g")])
        local, rewrites, rewrites_thinking = True, False, False
        for history in (base, *self._probe.histories(calls, tools)):
            try:
                asked = self._template.render(history[:-1], shown, generation_prompt=True).text
                before, _ = self._split(history, shown, generation_prompt=False)
                front, other = self._split([*history, *new], shown, generation_prompt=True)
            except TokenError:  # the template has no such history
                continue
            local = local and other == tail
            if front != before or not front.startswith(asked):
                rewrites = True
                thought = any("reasoning_content" in message for message in history)
                rewrites_thinking = rewrites_thinking or thought or asked.rstrip().endswith(THINK_OPEN)
        return Shape(local, complete, uses_tools, rewrites, rewrites_thinking)

    def _tail(self, base: list[PlainMessage], new: list[PlainMessage], tools: Tools) -> str | None:
        try:
            return self._split([*base, *new], tools, generation_prompt=True)[1]
        except TokenError:
            return None


def _name_calls(before: Sequence[PlainMessage], new: Sequence[PlainMessage]) -> None:
    """Give the calls of the last message in `before` the ids and names that the tool results in `new` refer to."""
    calls = before[-1].get("tool_calls") if before else None
    if not isinstance(calls, list):
        return
    for call, message in zip(calls, new, strict=False):  # pyright: ignore[reportUnknownVariableType]
        if message["role"] != "tool":
            return
        if "tool_call_id" in message:
            call["id"] = message["tool_call_id"]
        if "name" in message:
            call["function"]["name"] = message["name"]
