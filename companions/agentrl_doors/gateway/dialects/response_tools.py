"""The tools of Responses as functions: custom tools have one argument, nested ones carry the name of their namespace.

Invariant: the name of a function in the prompt stands for one tool, and an answer names the tool as the call does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple, cast

from agentrl.tokens.parse import parse_json
from agentrl_doors.gateway.body import CallRefused
from agentrl_doors.gateway.fields import Fields, argument_json, check_tools, function_tool

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
