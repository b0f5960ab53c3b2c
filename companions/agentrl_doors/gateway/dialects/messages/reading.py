"""What a call of Anthropic's Messages sends: its blocks as messages, its tools as functions.

Tools of Anthropic that a client runs have no schema in the call; here they have the one that their makers published.

Invariant: the blocks of an answer, sent again, read as the message that was answered; `cache_control` changes nothing. A
tool that a client runs is a function in the prompt, or refused by name; only what a provider runs is ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, cast

from agentrl.types import Message
from agentrl_doors.gateway.fields import Fields, argument_json, check_tools, function_tool, text_in_place, tool_call
from agentrl_doors.gateway.refusals import CallRefused

_TEXT: Final = {"type": "string"}
_NUMBER: Final = {"type": "integer"}
_RANGE: Final = {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 2}
_EDITS: Final = {
    "path": _TEXT,
    "file_text": _TEXT,
    "old_str": _TEXT,
    "new_str": _TEXT,
    "insert_line": _NUMBER,
    "insert_text": _TEXT,
    "view_range": _RANGE,
}
_PROVIDERS: Final = ("web_search", "web_fetch", "code_execution", "tool_search", "mcp_toolset", "advisor")
"""The beginnings of the types of tools that the provider's servers run."""


def _commands(*names: str, fields: Mapping[str, object], required: tuple[str, ...]) -> dict[str, object]:
    properties = {"command": {"type": "string", "enum": list(names)}, **fields}
    return {"type": "object", "properties": properties, "required": ["command", *required]}


def client_tool(kind: str) -> tuple[str, dict[str, object]] | None:
    """Return the description and the schema of a tool that a client runs; None if this type has none here.

    Example:
        >>> client_tool("bash_20250124")[1]["properties"].keys(), client_tool("computer_20250124")
        (dict_keys(['command', 'restart']), None)
    """
    if kind.startswith("bash_"):
        fields = {"command": _TEXT, "restart": {"type": "boolean"}}
        return "Run a command in a shell whose state stays, or restart it.", {"type": "object", "properties": fields}
    if kind.startswith("text_editor_"):
        undo = ("undo_edit",) if kind in ("text_editor_20241022", "text_editor_20250124") else ()
        names = ("view", "create", "str_replace", "insert", *undo)
        return "View, create and edit text files.", _commands(*names, fields=_EDITS, required=("path",))
    if kind.startswith("memory_"):
        fields = {**_EDITS, "old_path": _TEXT, "new_path": _TEXT}
        names = ("view", "create", "str_replace", "insert", "delete", "rename")
        return "Keep notes in files that later conversations can read.", _commands(*names, fields=fields, required=())
    return None


def is_run_by_provider(kind: str) -> bool:
    """Return whether the provider's servers run a tool of this type."""
    return kind.startswith(_PROVIDERS)


_ROLES: Final = ("user", "assistant", "system")
_SILENT: Final = ("type", "cache_control", "id", "name")
_BETWEEN: Final = "\n\n"
UNPARSED: Final = "__unparsedToolInput"
"""The field in which clients show arguments that are no JSON object."""


class BlockReader:
    """Reads messages; with `omit_media` a text takes the place of each image and file."""

    def __init__(self, *, omit_media: bool = False) -> None:
        self._omit_media = omit_media
        self.messages: list[Message] = []
        self.ignored: set[str] = set()

    def read_system(self, system: object) -> None:
        """Add the system prompt, text or blocks, as the first message."""
        text = self._text(system, "system")
        if text:
            self.messages.append({"role": "system", "content": text})

    def read(self, messages: list[object]) -> list[Message]:
        """Return all messages.

        Raises:
            CallRefused: a message is wrong, or has a block that is no text and no tool's.
        """
        for index, message in enumerate(messages):
            fields = Fields(message, f"messages[{index}]")
            role, content = fields.need("role", str), fields.any("content")
            if role not in _ROLES:
                raise CallRefused(f"{fields.place('role')} must be one of {', '.join(_ROLES)}, got {role!r:.80}")
            if role == "assistant":
                self._assistant(content, fields.place("content"))
            elif role == "user":
                self._user(content, fields.place("content"))
            else:
                self.messages.append({"role": "system", "content": self._text(content, fields.place("content"))})
            fields.skip(_SILENT)
            self._count("messages[]", fields)
        return self.messages

    def _user(self, content: object, where: str) -> None:
        """Add a message of the user: tool results become messages of their own, in order."""
        if not isinstance(content, list):
            self.messages.append({"role": "user", "content": self._text(content, where)})
            return
        texts: list[str] = []

        def end_text() -> None:
            if texts:
                self.messages.append({"role": "user", "content": _BETWEEN.join(texts)})
                texts.clear()

        for index, block in enumerate(cast("list[object]", content)):
            fields = Fields(block, f"{where}[{index}]")
            if fields.need("type", str) == "tool_result":
                end_text()
                self._tool_result(fields)
            else:
                texts.append(self._block_text(fields))
        end_text()

    def _tool_result(self, block: Fields) -> None:
        text = self._text(block.any("content"), block.place("content"))
        if block.read("is_error", bool) and not text:
            text = "error"
        self.messages.append({"role": "tool", "tool_call_id": block.need("tool_use_id", str), "content": text})
        block.skip(_SILENT)
        self._count("tool_result", block)

    def _assistant(self, content: object, where: str) -> None:
        if not isinstance(content, list):
            self.messages.append({"role": "assistant", "content": self._text(content, where)})
            return
        reasoning, texts, calls = list[str](), list[str](), list[object]()
        for index, block in enumerate(cast("list[object]", content)):
            fields = Fields(block, f"{where}[{index}]")
            kind = fields.need("type", str)
            if kind == "thinking":
                reasoning.append(fields.need("thinking", str))
                fields.skip(("signature",))
            elif kind == "redacted_thinking":
                self.ignored.add("messages[].redacted_thinking")
            elif kind == "tool_use":
                arguments = _argument_text(fields.any("input"))
                calls.append(tool_call(fields.need("id", str), fields.need("name", str), arguments))
                fields.skip(("caller",))
            else:
                texts.append(self._block_text(fields))
                continue
            fields.skip(_SILENT)
            self._count(kind, fields)
        message: dict[str, object] = {"role": "assistant", "content": "".join(texts) or (None if calls else "")}
        if any(reasoning):
            message["reasoning_content"] = "".join(reasoning)
        if calls:
            message["tool_calls"] = calls
        self.messages.append(message)

    def _text(self, content: object, where: str) -> str:
        """Return content, text or a list of text blocks, as text."""
        if content is None or isinstance(content, str):
            return content or ""
        if not isinstance(content, list):
            raise CallRefused(f"{where} must be text or a list of blocks, got {type(content).__name__} {content!r:.80}")
        blocks = enumerate(cast("list[object]", content))
        return _BETWEEN.join([self._block_text(Fields(block, f"{where}[{index}]")) for index, block in blocks])

    def _block_text(self, block: Fields) -> str:
        kind = block.need("type", str)
        if kind == "text":
            text = block.need("text", str)
            block.skip((*_SILENT, "citations"))
            self._count(kind, block)
            return text
        text = text_in_place(block.place("type").removesuffix(".type"), kind, omit_media=self._omit_media)
        self.ignored.add(f"messages[].{kind}")
        return text

    def _count(self, kind: str, block: Fields) -> None:
        self.ignored.update(f"{kind}.{each.rsplit('.', 1)[-1]}" for each in block.unread)


def _argument_text(given: object) -> str:
    """Return the input of a call as the text of arguments; one that no client could parse as it was sampled."""
    if isinstance(given, Mapping):
        unparsed = cast("Mapping[str, object]", given).get(UNPARSED)
        raw = cast("Mapping[str, object]", unparsed).get("raw") if isinstance(unparsed, Mapping) else None
        if isinstance(raw, str):
            return raw
    return argument_json({} if given is None else given)


def tools_of_blocks(given: list[object]) -> tuple[list[dict[str, object]], set[str]]:
    """Return tools as functions, and the kinds of those that a provider's servers run, which are ignored.

    Raises:
        CallRefused: a tool is wrong, two have one name, there are too many, or a client would run one that is unknown here.
    """
    check_tools(given)
    tools, ignored, names = list[dict[str, object]](), set[str](), set[str]()
    for index, tool in enumerate(given):
        fields = Fields(tool, f"tools[{index}]")
        kind = fields.read("type", str) or "custom"
        published = client_tool(kind)
        if kind != "custom" and published is None:
            if not is_run_by_provider(kind):
                raise CallRefused(
                    f"{fields.place('type')}: a tool of type {kind!r:.80} is run by its client and has no schema here; "
                    "send it as a tool with an input_schema, or leave it out"
                )
            ignored.add(f"tools[].{kind}"[:80])
            continue
        name = fields.need("name", str)
        if name in names:
            raise CallRefused(f"{fields.place('name')}: two tools are named {name!r:.80}; give each a name of its own")
        names.add(name)
        described, schema = published or (fields.read("description", str), fields.read("input_schema", dict))
        tools.append(function_tool(name, described, schema))
        fields.skip(_SILENT)
        ignored.update(f"tools[].{each.rsplit('.', 1)[-1]}" for each in fields.unread)
    return tools, ignored


def choice_arguments(choice: Mapping[str, object]) -> dict[str, object]:
    """Return the arguments of chat completions that a tool choice stands for."""
    fields = Fields(choice, "tool_choice")
    kind = fields.need("type", str)
    found: dict[str, object] = {}
    if fields.read("disable_parallel_tool_use", bool):
        found["parallel_tool_calls"] = False
    if kind == "tool":
        found["tool_choice"] = {"type": "function", "function": {"name": fields.need("name", str)}}
    elif kind in ("auto", "any", "none"):
        found["tool_choice"] = "required" if kind == "any" else kind
    else:
        raise CallRefused(f"tool_choice.type must be auto, any, tool or none, got {kind!r:.80}")
    return found
