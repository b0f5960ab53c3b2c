"""What a template writes between one model output and the next: found by probing, rendered from the new messages only.

A template is *local* for a shape of new messages (their roles) if the text it writes for them does not depend on what
came before. That is checked by rendering made-up conversations, once per shape, and remembered. For a local shape the text
is cut out of a two-message conversation followed by the new messages, so a turn costs what is new. Otherwise the whole
conversation is rendered.

Invariant: `DeltaRenderer.render` returns the text from the end of the last assistant message, that message's closing
included, to the point where the model writes; it is the text the template writes there for the whole conversation.
"""

from __future__ import annotations

import itertools
import json
import secrets
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from agentrl.errors import TokenError
from agentrl.tokens.guard import GuardedTemplate, Rendered, Tools
from agentrl.tokens.parse import THINK_OPEN
from agentrl.tokens.template import PlainMessage

Roles = tuple[str, ...]
"""The roles of new messages; an assistant message with tool calls is `call`."""

_STANDARD: tuple[Roles, ...] = (
    ("user",),
    ("tool",),
    ("tool", "tool"),
    ("tool", "user"),
    ("user", "assistant", "user"),
    ("user", "call", "tool"),
)


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

    def __init__(
        self, template: GuardedTemplate, *, ends: Sequence[str], controls: Sequence[str], text_arguments: bool
    ) -> None:
        """Probe the template.

        Args:
            template: the guarded template.
            ends: texts of the end-of-sequence tokens.
            controls: texts of all control tokens.
            text_arguments: whether the template wants tool arguments as JSON text.
        """
        self._template = template
        self._text_arguments = text_arguments
        self._probe = str(10**27 + secrets.randbelow(9 * 10**27))
        self._ends = tuple(ends)
        self._plain_tail = self._split([*self._base(0)], None, generation_prompt=False)[1]
        starts = [(self._plain_tail.find(text), -len(text), text) for text in controls if text in self._plain_tail]
        self.end_of_turn: str | None = min(starts)[2] if starts else None
        """The token text that ends an assistant message; None if the template writes none."""
        if self.end_of_turn is not None:
            self._ends = (*self._ends, self.end_of_turn)
        self.shape = lru_cache(maxsize=256)(self._shape)
        self.shows = lru_cache(maxsize=64)(self._shows)
        self._rest = lru_cache(maxsize=64)(self._text_after_calls)
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
        calls = _leading(roles)
        before = self._base(calls) if shape.local else [*history[:-1], self._assistant(calls)]
        _name_calls(before, new)
        shown = tools if shape.uses_tools or not shape.local else None
        rendered = self._template.render([*before, *new], shown, generation_prompt=generation_prompt)
        _, found, tail = rendered.text.partition(self._probe)
        at = self._closing_at(tail, calls, bool(shown)) if found else -1
        if at < 0:
            raise TokenError(f"the chat template mixes new messages {roles} with the earlier ones")
        return Rendered(tail[at:], rendered.nonce)

    def _shows(self, role: str) -> bool:
        """Return whether the template writes messages of a role (`call`: tool calls) anywhere in a conversation."""
        refused = True
        shown: tuple[Tools, Tools] = (None, [_stub("f")])
        befores: tuple[Roles, ...] = ((), ("user",), ("user", "assistant"), ("user", "call"))
        for before, after, tools in itertools.product(befores, ((), ("user",)), shown):
            try:
                text = self._template.render(self._made_up((*before, role, *after)), tools, generation_prompt=True).text
            except TokenError:
                continue
            refused = False
            if self._mark(len(before)) in text:
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
            for roles in _STANDARD:
                if tools or not {"tool", "call"} & set(roles):
                    try:
                        shapes.append(self.shape(roles, tools))
                    except TokenError:  # the template has no such conversations
                        continue
        return shapes

    def _sees_tools(self) -> bool:
        try:
            texts = [self._template.render([_user()], [_stub(name)], generation_prompt=True).text for name in ("f", "g")]
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
        _, tail = self._split([*self._base(calls)], [_stub("f")] if tools else None, generation_prompt=False)
        return tail.removesuffix(self._plain_tail)

    def _split(self, messages: list[PlainMessage], tools: Tools, *, generation_prompt: bool) -> tuple[str, str]:
        text = self._template.render(messages, tools, generation_prompt=generation_prompt).text
        front, found, tail = text.partition(self._probe)
        if not found:
            raise TokenError("the chat template does not write the text of assistant messages")
        return front, tail

    def _shape(self, roles: Roles, tools: bool) -> Shape:
        new = self._made_up(roles)
        calls = _leading(roles)
        shown = [_stub("f")] if tools else None
        base = self._base(calls)
        _, tail = self._split([*base, *new], shown, generation_prompt=True)
        places = [tail.find(self._mark(at)) for at in range(len(new))]
        complete = -1 not in places and places == sorted(places)
        uses_tools = tools and not tail == self._tail(base, new, None) == self._tail(base, new, [_stub("g")])
        local, rewrites, rewrites_thinking = True, False, False
        for history in (base, *self._histories(calls, tools)):
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

    def _histories(self, calls: int, tools: bool) -> list[list[PlainMessage]]:
        last = self._assistant(calls)
        thinking: PlainMessage = {"reasoning_content": "r", "thinking": "r"}
        earlier: list[Roles] = [("system", "user", "assistant", "user"), ("user", "assistant", "user", "assistant", "user")]
        if tools:
            earlier += [("user", "call", "tool"), ("system", "user", "call", "tool", "tool", "assistant", "user")]
        histories: list[list[PlainMessage]] = []
        for before in (("user",), *earlier):
            messages = self._made_up(before)
            histories.append([*messages, last])
            thought = [{**m, **thinking} if m["role"] == "assistant" else m for m in messages]
            histories.append([*thought, {**last, **thinking}])
        return histories

    def _made_up(self, roles: Roles) -> list[PlainMessage]:
        messages: list[PlainMessage] = []
        for at, role in enumerate(roles):
            mark = self._mark(at)
            if role == "call":
                count = _leading(roles[at + 1 :])
                messages.append({"role": "assistant", "content": None, "tool_calls": self._calls(max(1, count), mark)})
            else:
                messages.append({"role": role, "content": mark})
                if role == "tool":
                    messages[-1]["tool_call_id"] = f"call0000{_leading(roles[:at][::-1]) % 10}"
        return messages

    def _mark(self, at: int) -> str:
        return f"{self._probe[::-1]}{at:06d}"

    def _base(self, calls: int) -> list[PlainMessage]:
        return [_user(), self._assistant(calls)]

    def _assistant(self, calls: int) -> PlainMessage:
        if calls == 0:
            return {"role": "assistant", "content": self._probe}
        return {"role": "assistant", "content": None, "tool_calls": self._calls(calls, self._probe)}

    def _calls(self, count: int, mark: str) -> list[dict[str, object]]:
        calls: list[dict[str, object]] = []
        for at in range(count):
            arguments: object = {"x": mark if at == count - 1 else "y"}
            arguments = json.dumps(arguments) if self._text_arguments else arguments
            function: dict[str, object] = {"name": "f", "arguments": arguments}
            calls.append({"type": "function", "function": function, "id": f"call0000{at % 10}"})
        return calls


def _leading(roles: Roles) -> int:
    """Return how many tool results `roles` begins with."""
    return next((at for at, role in enumerate(roles) if role != "tool"), len(roles))


def roles_of(messages: Sequence[PlainMessage]) -> Roles:
    """Return the shape of new messages."""
    return tuple("call" if message.get("tool_calls") else str(message["role"]) for message in messages)


def wants_text_arguments(template: GuardedTemplate) -> bool:
    """Return whether a template needs tool arguments as JSON text: it breaks on a value, and not on text."""
    for arguments in ({"x": "y"}, '{"x": "y"}'):
        call = {"type": "function", "id": "call00000", "function": {"name": "f", "arguments": arguments}}
        messages: list[PlainMessage] = [
            _user(),
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": "z", "tool_call_id": "call00000"},
        ]
        try:
            template.render(messages, [_stub("f")], generation_prompt=True)
        except TokenError:
            continue
        return isinstance(arguments, str)
    return False


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


def _user() -> PlainMessage:
    return {"role": "user", "content": "q"}


def _stub(name: str) -> Mapping[str, object]:
    properties = {"x": {"type": "string", "description": "d"}}
    parameters: dict[str, object] = {"type": "object", "properties": properties, "required": ["x"]}
    return {"type": "function", "function": {"name": name, "description": "d", "parameters": parameters}}
