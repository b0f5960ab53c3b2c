"""Probes how a chat template renders new messages, with made-up conversations, once for each sequence of roles.

A template is *local* for new messages of given roles if the text that it writes for them does not depend on the earlier
conversation. Each made-up text can be found in a rendering, because it consists of random digits that appear nowhere else.

The first run of a template, which is foreign code, is in a forked process with limits on memory and time. A template that
takes more is refused; one that misbehaves only later has the limits of `ChatTemplate.render` alone.
"""

from __future__ import annotations

import itertools
import json
import os
import resource
import secrets
import signal
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple, NoReturn

from agentrl.errors import ConfigError, TokenError
from agentrl.tokens.parse import THINK_OPEN
from agentrl.tokens.template.rendering import ChatTemplate, GuardedTemplate, PlainMessage, Roles, ToolSchemas

QUESTION: PlainMessage = {"role": "user", "content": "q"}
"""A user message."""
USUAL: tuple[Roles, ...] = (
    ("user",),
    ("tool",),
    ("tool", "tool"),
    ("tool", "user"),
    ("user", "assistant", "user"),
    ("user", "call", "tool"),
)
"""The sequences of roles with which every template is probed."""
MEMORY_BYTES = 2**30
"""Memory that the renderings may add to the process."""
CPU_SECONDS = 10
"""Processor time of all renderings together; a usual template takes a few milliseconds."""
_WALL_SECONDS = 120.0
_OUT_OF_MEMORY = 3
"""Exit status of the fork."""
_CALL: dict[str, object] = {"name": "search", "arguments": {"query": "weather", "limit": 3}}
_TOOLS: ToolSchemas = [
    {
        "type": "function",
        "function": {
            "name": "search",
            "description": "Searches.",
            "parameters": {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]},
        },
    }
]
_LENGTHS = (1, 2, 12)
"""Rounds of the conversations."""


class CallStyle(NamedTuple):
    """How a template takes messages with calls."""

    text_arguments: bool = False
    """Whether it needs the arguments as JSON text."""
    no_text: str | None = None
    """The content of a message that is calls alone: None or, for templates that break on it, empty text."""


class ProbeMessages:
    """Makes up conversations for one template."""

    def __init__(self, style: CallStyle) -> None:
        self.text = str(10**27 + secrets.randbelow(9 * 10**27))
        """The text of the last assistant message, or of its last tool call."""
        self._style = style

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
                calls = self._calls(max(1, count), mark)
                messages.append({"role": "assistant", "content": self._style.no_text, "tool_calls": calls})
            else:
                messages.append({"role": role, "content": mark})
                if role == "tool":
                    messages[-1]["tool_call_id"] = f"call0000{leading_results(roles[:at][::-1]) % 10}"
        return messages

    def base(self, calls: int) -> list[PlainMessage]:
        """Return the shortest conversation that ends with an assistant message, with `calls` tool calls."""
        return [QUESTION, self.assistant(calls)]

    def assistant(self, calls: int) -> PlainMessage:
        """Return an assistant message with `calls` tool calls, or else with text."""
        if calls == 0:
            return {"role": "assistant", "content": self.text}
        return {"role": "assistant", "content": self._style.no_text, "tool_calls": self._calls(calls, self.text)}

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
            arguments = json.dumps(arguments) if self._style.text_arguments else arguments
            function: dict[str, object] = {"name": "f", "arguments": arguments}
            calls.append({"type": "function", "function": function, "id": f"call0000{at % 10}"})
        return calls


def leading_results(roles: Roles) -> int:
    """Return how many tool results `roles` begins with."""
    return next((at for at, role in enumerate(roles) if role != "tool"), len(roles))


def stub(name: str) -> Mapping[str, object]:
    """Return the schema of a tool."""
    properties = {"x": {"type": "string", "description": "d"}}
    parameters: dict[str, object] = {"type": "object", "properties": properties, "required": ["x"]}
    return {"type": "function", "function": {"name": name, "description": "d", "parameters": parameters}}


def wants_text_arguments(template: GuardedTemplate) -> bool:
    """Return whether a template needs tool arguments as JSON text: it fails for a value, and not for text."""
    for arguments in ({"x": "y"}, '{"x": "y"}'):
        call = {"type": "function", "id": "call00000", "function": {"name": "f", "arguments": arguments}}
        messages: list[PlainMessage] = [
            QUESTION,
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": "z", "tool_call_id": "call00000"},
        ]
        try:
            template.render(messages, [stub("f")], generation_prompt=True)
        except TokenError:
            continue
        return isinstance(arguments, str)
    return False


class TemplateTraits(NamedTuple):
    """The way in which a template renders new messages of given roles."""

    local: bool
    """The text for the new messages does not depend on the conversation before them."""
    complete: bool
    """Every new message appears after the last assistant message, in order."""
    uses_tools: bool
    """The text for the new messages depends on the tools, or on whether there are any."""
    rewrites: bool
    """The template changes its text for the messages up to the end of the last assistant message."""
    rewrites_thinking: bool
    """The same, if earlier messages carry reasoning."""
    num_calls: int
    """Number of tool results at the start of the new messages; the assistant message before them has as many calls."""
    answer: PlainMessage
    """A made-up assistant message with these calls, whose last text is `TemplateProber.mark`."""
    closing: str
    """The text between the mark and the end of the assistant message, for a template that writes no end-of-turn token."""


class TemplateProber:
    """Probes a template; immutable except for a bounded memory of probed roles."""

    def __init__(self, template: GuardedTemplate, *, style: CallStyle, ends: Sequence[str], controls: Sequence[str]) -> None:
        """Probe the template; `ends` are the texts of end-of-sequence tokens, `controls` the texts of all control tokens."""
        self._template = template
        self._probe = ProbeMessages(style)
        self.mark: str = self._probe.text
        """The text of the made-up assistant message, or of its last tool call."""
        self._plain_tail = self._split(self._probe.base(0), None, generation_prompt=False)[1]
        starts = [(self._plain_tail.find(text), -len(text), text) for text in controls if text in self._plain_tail]
        self.end_of_turn: str | None = min(starts)[2] if starts else None
        """The token text that ends an assistant message; None if the template writes none."""
        self.ends: tuple[str, ...] = tuple(text for text in (*ends, self.end_of_turn) if text)
        """The texts that can end an assistant message."""
        self.traits = lru_cache(maxsize=256)(self._traits)
        """Returns the traits of the template for new messages of these roles."""
        self.shows = lru_cache(maxsize=64)(self._shows)
        """Returns whether the template writes messages of a role at all."""
        self.breaks_on = lru_cache(maxsize=8)(self._breaks_on)
        """Returns whether the template cannot write calls (`call`), or results (`tool`), in any conversation."""
        self.renders_tools: bool = self._sees_tools()
        """Whether the template shows the tools to the model."""

    def _shows(self, role: str) -> bool:
        """Return whether the template writes messages of a role (`call`: tool calls) anywhere in a conversation."""
        refused = True
        shown: tuple[ToolSchemas | None, ToolSchemas] = (None, [stub("f")])
        earlier: tuple[Roles, ...] = ((), ("user",), ("user", "assistant"), ("user", "call"))
        for before, after, tools in itertools.product(earlier, ((), ("user",)), shown):
            messages = self._probe.messages((*before, role, *after))
            try:
                text = self._template.render(messages, tools, generation_prompt=True).text
            except TokenError:
                continue
            refused = False
            if self._probe.mark(len(before)) in text:
                return True
        return refused  # the template itself refuses it, with a better message

    def _breaks_on(self, role: str) -> bool:
        for roles in ((role,), ("user", role), ("user", "call", role), ("user", role, "user")):
            messages = self._probe.messages(roles)
            try:
                text = self._template.render(messages, None, generation_prompt=True).text
            except TokenError:
                continue
            if self._probe.mark(roles.index(role)) in text:
                return False
        return True

    def text_prefix_preserving(self) -> bool:
        """Return whether the template only appends text, for the usual new messages."""
        return all(traits.complete and not traits.rewrites for traits in self._usual_traits())

    def local(self) -> bool:
        """Return whether the template is local for the usual new messages."""
        return all(traits.local and traits.complete for traits in self._usual_traits())

    def _usual_traits(self) -> list[TemplateTraits]:
        found: list[TemplateTraits] = []
        for tools in (False, True):
            for roles in USUAL:
                if tools or not {"tool", "call"} & set(roles):
                    try:
                        found.append(self.traits(roles, tools))
                    except TokenError:  # the template has no such conversations
                        continue
        return found

    def _sees_tools(self) -> bool:
        try:
            texts = [self._template.render([QUESTION], [stub(name)], generation_prompt=True).text for name in ("f", "g")]
        except TokenError:
            return False
        return texts[0] != texts[1]

    def _text_after_calls(self, calls: int, tools: bool) -> str:
        """Return the text between the mark and the end of the message, for a template without an end-of-turn token."""
        if calls == 0:
            return ""
        _, tail = self._split(self._probe.base(calls), [stub("f")] if tools else None, generation_prompt=False)
        return tail.removesuffix(self._plain_tail)

    def _split(self, messages: list[PlainMessage], tools: ToolSchemas | None, *, generation_prompt: bool) -> tuple[str, str]:
        text = self._template.render(messages, tools, generation_prompt=generation_prompt).text
        front, found, tail = text.partition(self._probe.text)
        if not found:
            raise TokenError("the chat template does not write the text of assistant messages")
        return front, tail

    def _traits(self, roles: Roles, tools: bool) -> TemplateTraits:
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
        ended = any(text in tail for text in self.ends)
        closing = "" if ended else self._text_after_calls(calls, tools and (uses_tools or not local))
        return TemplateTraits(
            local, complete, uses_tools, rewrites, rewrites_thinking, calls, self._probe.assistant(calls), closing
        )

    def _tail(self, base: list[PlainMessage], new: list[PlainMessage], tools: ToolSchemas | None) -> str | None:
        try:
            return self._split([*base, *new], tools, generation_prompt=True)[1]
        except TokenError:
            return None


def try_out(build: Callable[[], ChatTemplate], where: str, *, cpu_seconds: int = CPU_SECONDS) -> None:
    """Compile a template with `build` and render ordinary conversations in a fork of this process.

    An error of `build`, and what the template refuses, is no finding here: this process meets it again, and reports it.

    Raises:
        ConfigError: the template takes too much memory, or more than `cpu_seconds` for all renderings together.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads: the fork renders and exits
        child = os.fork()
    if not child:
        _render_and_exit(build, cpu_seconds)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if not status:
        return
    too_much = "memory" if status == _OUT_OF_MEMORY else f"time (it was ended by {_ending_name(status)})"
    raise ConfigError(
        f"{where}: the chat template takes too much {too_much} for a conversation of {2 + 4 * _LENGTHS[-1]} short messages; "
        f"the limits are {MEMORY_BYTES >> 20} MiB and {cpu_seconds} s. It is not fit for use: take the template of the "
        "original model"
    )


def _ending_name(status: int) -> str:
    return signal.Signals(-status).name if status < 0 else f"exit status {status}"


def _render_and_exit(build: Callable[[], ChatTemplate], cpu_seconds: int) -> NoReturn:
    """Render under limits and end the process; no handler or clean-up of the parent's runs here."""
    status = 1
    try:
        for number in (signal.SIGALRM, signal.SIGXCPU, signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, _WALL_SECONDS)
        with suppress(FileNotFoundError):  # where there is no /proc, memory has no limit
            pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
            limit = pages * resource.getpagesize() + MEMORY_BYTES
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        resource.setrlimit(resource.RLIMIT_CPU, (cpu_seconds, cpu_seconds))
        template = build()
        status = max(_render(template, rounds, tools) for rounds in _LENGTHS for tools in (None, _TOOLS))
    except MemoryError:
        status = _OUT_OF_MEMORY
    except Exception:  # noqa: BLE001 - the parent meets the error again
        status = 0
    finally:
        os._exit(status)


def _render(template: ChatTemplate, rounds: int, tools: ToolSchemas | None) -> int:
    try:
        template.render(_short_conversation(rounds, with_calls=tools is not None), tools, generation_prompt=True)
    except TokenError as error:
        if isinstance(error.__cause__, MemoryError):
            return _OUT_OF_MEMORY
    return 0


def _short_conversation(rounds: int, *, with_calls: bool) -> list[PlainMessage]:
    messages: list[PlainMessage] = [{"role": "system", "content": "Be brief."}]
    for _ in range(rounds):
        messages.append({"role": "user", "content": "How is the weather?\nAnd tomorrow?"})
        if with_calls:
            calls = [{"type": "function", "id": "call00000", "function": _CALL}]
            messages.append({"role": "assistant", "content": None, "tool_calls": calls})
            messages.append({"role": "tool", "content": "Sunny.", "tool_call_id": "call00000", "name": "search"})
        messages.append({"role": "assistant", "content": "Sunny.", "reasoning_content": "Let me see."})
    messages.append({"role": "user", "content": "Thanks!"})
    return messages
