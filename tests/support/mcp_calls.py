"""How tests reach `mcp_server.py`, which is a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from agentrl_envs.mcp import McpServer

SCRIPT = str(Path(__file__).parent / "mcp_server.py")
COMMAND = [sys.executable, SCRIPT]


def call(tool: str, /, **arguments: object) -> dict[str, Any]:
    """Return a tool call as the OpenAI wire writes it."""
    return {"id": "c1", "type": "function", "function": {"name": tool, "arguments": json.dumps(arguments)}}


async def content(server: McpServer, tool: str, /, **arguments: object) -> str:
    """Return what a tool answers."""
    return str((await server.reply(call(tool, **arguments)))["content"])


@contextmanager
def web_server() -> Generator[str]:
    """Serve over HTTP inside the block, and yield the URL."""
    with subprocess.Popen([*COMMAND, "http"], stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            yield f"http://127.0.0.1:{server.stdout.readline().strip()}/mcp"
        finally:
            server.kill()
