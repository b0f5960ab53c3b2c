"""The worker's end of `in_process` and of tools with `run_in="process"`.

Invariant: it takes names and gives back JSON. A process that raised another error than `ToolError` is not used again.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import cast

from agentrl.client.tools.errors import ToolError
from agentrl.client.tools.functions import Tool
from agentrl.client.tools.processes import resolve_name


def load_caller() -> Callable[[str, str, str], dict[str, object]]:
    """Return the function that answers the jobs of the worker."""
    return _run_named


def _run_named(kind: str, name: str, arguments: str) -> dict[str, object]:
    function = resolve_name(name)
    try:
        if kind == "tool":
            tool = function if isinstance(function, Tool) else Tool(cast("Callable[..., object]", function))
            return {"value": tool.call_with_json(arguments)}
        return {"value": cast("Callable[..., object]", function)(*json.loads(arguments))}
    except ToolError as error:
        return {"tool_error": str(error)}
