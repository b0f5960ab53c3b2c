"""Tools of Anthropic that its clients run, as functions with the arguments that their makers published.

Invariant: a tool that a client runs is a function in the prompt, or refused by name; only what a provider runs is ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

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
