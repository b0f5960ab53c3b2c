"""What a call of Responses sends: items as messages, tools as functions.

Reasoning, text and calls that belong together become one message of the assistant. A custom tool has one argument; a nested
one carries the name of its namespace.

Invariant: the items of an answer, sent again in any spelling, read as the message that was answered. The name of a function
in the prompt stands for one tool.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple, cast

from agentrl.tokens.parse import parse_json
from agentrl.types import Message
from agentrl_doors.gateway.fields import Fields, argument_json, check_tools, function_tool, text_in_place, tool_call
from agentrl_doors.gateway.items import ItemStore
from agentrl_doors.gateway.refusals import CallRefused

CUSTOM_ARGUMENT: Final = "input"
"""The one argument of a custom tool."""
_OF_PROVIDERS: Final = ("web_search", "file_search", "code_interpreter", "image_generation", "mcp", "tool_search")
"""The beginnings of the types of tools that the provider's servers run."""
_JOINT: Final = "__"


class ToolName(NamedTuple):
    """A tool as the call names it."""

    name: str
    namespace: str | None = None
    custom: bool = False


class Tools(NamedTuple):
    """The tools of a call."""

    functions: list[dict[str, object]]
    """As chat completions has them."""
    names: Mapping[str, ToolName]
    """By the name of the function in the prompt."""
    ignored: tuple[str, ...]


def prompt_name(name: str, namespace: str | None) -> str:
    """Return the name of a tool in the prompt.

    Example:
        >>> prompt_name("spawn", None), prompt_name("spawn", "agents")
        ('spawn', 'agents__spawn')
    """
    return name if namespace is None else f"{namespace}{_JOINT}{name}"


def read_tools(sent: object) -> Tools:
    """Return the tools of a body; those that a provider runs, such as `web_search`, are ignored by name.

    Raises:
        CallRefused: a tool is wrong or of a type that its client would run, two have one name, or there are too many.
    """
    if sent is None:
        return Tools([], {}, ())
    if not isinstance(sent, list):
        raise CallRefused(f"tools must be a list, got {type(sent).__name__} {sent!r:.80}")
    tools = cast("list[object]", sent)
    check_tools(tools)
    reader = _ToolReader()
    for index, tool in enumerate(tools):
        reader.add(Fields(tool, f"tools[{index}]"), None)
    return Tools(reader.functions, reader.names, tuple(sorted(reader.ignored)))


class _ToolReader:
    def __init__(self) -> None:
        self.functions: list[dict[str, object]] = []
        self.names: dict[str, ToolName] = {}
        self.ignored: set[str] = set()

    def add(self, tool: Fields, namespace: str | None) -> None:
        """Add one tool, or all of a namespace."""
        kind = tool.need("type", str)
        if kind == "function":
            self._add(tool, ToolName(tool.need("name", str), namespace), tool.read("parameters", dict))
        elif kind == "custom":
            parameters = _custom_parameters(tool.read("format", dict))
            self._add(tool, ToolName(tool.need("name", str), namespace, custom=True), parameters)
        elif kind == "namespace" and namespace is None:
            name = tool.need("name", str)
            nested = cast("list[object]", tool.need("tools", list))
            check_tools(nested)
            for index, each in enumerate(nested):
                self.add(Fields(each, f"{tool.place('tools')}[{index}]"), name)
        elif kind.startswith(_OF_PROVIDERS):
            self.ignored.add(f"tools[].{kind}"[:80])
        else:
            raise CallRefused(
                f"{tool.place('type')}: a tool of type {kind!r:.80} is not served: its client would run it, and the policy "
                "knows functions and custom tools; send it as one of these, or leave it out"
            )

    def _add(self, tool: Fields, name: ToolName, parameters: Mapping[str, object] | None) -> None:
        shown = prompt_name(name.name, name.namespace)
        if shown in self.names:
            raise CallRefused(f"{tool.place('name')}: two tools are named {shown!r}; give each a name of its own")
        self.names[shown] = name
        self.functions.append(function_tool(shown, tool.read("description", str), parameters))
        self.ignored.update(f"tools[].{each.rsplit('.', 1)[-1]}" for each in tool.unread)


def _custom_parameters(form: Mapping[str, object] | None) -> dict[str, object]:
    """Return the schema of a custom tool: its text, in the grammar that the call gives."""
    described = "The input of the tool, as plain text."
    if form is not None and form.get("type") == "grammar":
        described = (
            f"The input of the tool, as text in this grammar ({form.get('syntax', 'lark')}):\n{form.get('definition', '')}"
        )
    return {
        "type": "object",
        "properties": {CUSTOM_ARGUMENT: {"type": "string", "description": described}},
        "required": [CUSTOM_ARGUMENT],
    }


def custom_input(arguments: str) -> str:
    """Return the input of a custom tool from the arguments of its function; arguments of another shape as they are.

    Example:
        >>> custom_input('{"input": "*** Begin"}'), custom_input('{"patch": 1}')
        ('*** Begin', '{"patch": 1}')
    """
    value = parse_json(arguments)
    if isinstance(value, dict):
        fields = cast("dict[str, object]", value)
        text = fields.get(CUSTOM_ARGUMENT)
        if isinstance(text, str) and len(fields) == 1:
            return text
    return arguments


def custom_arguments(text: str) -> str:
    """Return the arguments that stand for the input of a custom tool."""
    return argument_json({CUSTOM_ARGUMENT: text})


def read_tool_choice(choice: object, names: Mapping[str, ToolName]) -> object:
    """Return a tool choice as chat completions has it; the client checks it."""
    if not isinstance(choice, Mapping):
        return choice
    fields = cast("Mapping[str, object]", choice)
    if fields.get("type") not in ("function", "custom"):
        return fields
    namespace = fields.get("namespace")
    name = prompt_name(str(fields.get("name")), namespace if isinstance(namespace, str) else None)
    return {"type": "function", "function": {"name": name}}


_ROLES: Final = ("user", "system", "developer", "assistant")
_TEXTS: Final = frozenset({"input_text", "output_text", "text", "reasoning_text", "summary_text"})
_SEALED: Final = "agentrl1:"
"""The beginning of reasoning as `encrypted_content`. It hides nothing: clients carry it, and a policy has no secrets."""
_SILENT: Final = frozenset({"id", "status", "type", "object", "created_by"})
BETWEEN_PARTS: Final = "\n\n"
"""The text between two parts of one message."""


def sealed(reasoning: str) -> str:
    """Return reasoning as `encrypted_content`."""
    return _SEALED + base64.b64encode(reasoning.encode("utf-8", "surrogatepass")).decode()


def unsealed(text: str) -> str | None:
    """Return the reasoning of `encrypted_content`; None if another server wrote it.

    Example:
        >>> unsealed(sealed("I add.")), unsealed("gAAAA")
        ('I add.', None)
    """
    if not text.startswith(_SEALED):
        return None
    try:
        return base64.b64decode(text.removeprefix(_SEALED), validate=True).decode("utf-8", "surrogatepass")
    except ValueError:
        return None


def resolved_input(sent: object, store: ItemStore | None) -> list[Mapping[str, object]]:
    """Return the input of a body as items, each reference replaced by the item that it names.

    Raises:
        CallRefused: the input is neither text nor a list of objects, or names an unknown item.
    """
    if isinstance(sent, str):
        return [{"type": "message", "role": "user", "content": sent}]
    if not isinstance(sent, list):
        raise CallRefused(f"input must be text or a list of items, got {type(sent).__name__} {sent!r:.80}")
    items: list[Mapping[str, object]] = []
    for index, item in enumerate(cast("list[object]", sent)):
        if not isinstance(item, dict):
            raise CallRefused(f"input[{index}] must be an object, got {type(item).__name__} {item!r:.80}")
        fields = cast("dict[str, object]", item)
        is_bare = fields.keys() == {"id"}
        items.append(_item_named(fields, index, store) if is_bare or fields.get("type") == "item_reference" else fields)
    return items


def _item_named(item: Mapping[str, object], index: int, store: ItemStore | None) -> Mapping[str, object]:
    name = item.get("id")
    found = store.item(name) if store is not None and isinstance(name, str) else None
    if found is None:
        kept = "this server keeps nothing between calls" if store is None else "it is not one of this session"
        raise CallRefused(
            f"input[{index}]: there is no item with id {name!r:.80}: {kept}; send the item itself (store=false does so)",
            status=404,
            code="item_not_found",
        )
    return found


class ItemReader:
    """Reads items into messages; with `omit_media` a text takes the place of each image and file."""

    def __init__(self, *, omit_media: bool = False) -> None:
        self._omit_media = omit_media
        self.messages: list[Message] = []
        self.ignored: set[str] = set()
        self._open: dict[str, object] = {}
        """The message of the assistant that further items may belong to."""
        self._kinds: Mapping[str, Callable[[Fields], None]] = {
            "message": self._message,
            "reasoning": self._reasoning,
            "function_call": self._call,
            "function_call_output": self._output,
            "custom_tool_call": self._custom_call,
            "custom_tool_call_output": self._output,
        }

    def read(self, items: Sequence[Mapping[str, object]]) -> list[Message]:
        """Return the messages of a conversation.

        Raises:
            CallRefused: an item is wrong, or of a kind that only a provider's own tools make.
        """
        for index, item in enumerate(items):
            fields = Fields(item, f"input[{index}]")
            kind = fields.read("type", str) or "message"
            read = self._kinds.get(kind)
            if read is None:
                raise CallRefused(
                    f"input[{index}] is of type {kind!r:.80}, which nothing on this server makes; "
                    f"it takes {', '.join(self._kinds)}, item_reference"
                )
            read(fields)
            fields.skip(_SILENT)
            self.ignored.update(f"input[].{kind}.{each.rsplit('.', 1)[-1]}" for each in fields.unread)
        self._close()
        return self.messages

    def _message(self, item: Fields) -> None:
        role = item.need("role", str)
        if role not in _ROLES:
            raise CallRefused(f"{item.place('role')} must be one of {', '.join(_ROLES)}, got {role!r:.80}")
        between = "" if role == "assistant" else BETWEEN_PARTS
        text = self._text(item, "content", between=between)
        if role != "assistant":
            self._close()
            self.messages.append({"role": role, "content": text})
            return
        item.skip(("phase",))
        if "content" in self._open or "tool_calls" in self._open:
            self._close()
        self._open["content"] = text

    def _reasoning(self, item: Fields) -> None:
        if self._open:
            self._close()
        encrypted = item.read("encrypted_content", str)
        text = None if encrypted is None else unsealed(encrypted)
        for name in ("content", "summary"):
            parts = item.any(name)
            if not text and parts:
                text = self._text(item, name)
        if text:
            self._open["reasoning_content"] = text
        elif encrypted:
            self.ignored.add("input[].reasoning.encrypted_content")

    def _call(self, item: Fields) -> None:
        name = prompt_name(item.need("name", str), item.read("namespace", str))
        arguments = item.any("arguments")
        self._add_call(
            item, name, arguments if isinstance(arguments, str) else argument_json({} if arguments is None else arguments)
        )

    def _custom_call(self, item: Fields) -> None:
        name = prompt_name(item.need("name", str), item.read("namespace", str))
        self._add_call(item, name, custom_arguments(item.read("input", str) or ""))

    def _add_call(self, item: Fields, name: str, arguments: str) -> None:
        calls = cast("list[object]", self._open.setdefault("tool_calls", []))
        calls.append(tool_call(item.need("call_id", str), name, arguments))

    def _output(self, item: Fields) -> None:
        self._close()
        content = self._text(item, "output")
        self.messages.append({"role": "tool", "tool_call_id": item.need("call_id", str), "content": content})
        item.skip(("name",))

    def _close(self) -> None:
        """End the open message of the assistant."""
        if self._open:
            content = self._open.get("content") or ("" if "tool_calls" not in self._open else None)
            self.messages.append({"role": "assistant", **self._open, "content": content})
            self._open = {}

    def _text(self, item: Fields, name: str, *, between: str = BETWEEN_PARTS) -> str:
        """Return content, text or a list of parts, as text.

        Raises:
            CallRefused: a part is no text, such as an image.
        """
        content, where = item.any(name), item.place(name)
        if content is None or isinstance(content, str):
            return content or ""
        if not isinstance(content, list):
            raise CallRefused(f"{where} must be text or a list of parts, got {type(content).__name__} {content!r:.80}")
        texts: list[str] = []
        for index, part in enumerate(cast("list[object]", content)):
            texts.append(part if isinstance(part, str) else self._part_text(Fields(part, f"{where}[{index}]")))
        return between.join(texts)

    def _part_text(self, part: Fields) -> str:
        kind = part.read("type", str) or "text"
        if kind == "refusal":
            text = part.need("refusal", str)
        elif kind in _TEXTS:
            text = part.need("text", str)
            part.skip(("annotations", "logprobs", "prompt_cache_breakpoint"))
        else:
            text = text_in_place(part.place("type").removesuffix(".type"), kind, omit_media=self._omit_media)
            self.ignored.add(f"input[].{kind}")
            return text
        self.ignored.update(f"input[].{kind}.{each.rsplit('.', 1)[-1]}" for each in part.unread)
        return text
