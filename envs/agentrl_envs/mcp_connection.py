"""How a client of the MCP SDK reaches a server: a process that is started, or a URL.

Both eras of the protocol are spoken: `auto` asks by `server/discover`, which servers of 2026-07-28 answer, and falls back to
the handshake of 2025-11-25 and before.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TYPE_CHECKING, Final

from agentrl.errors import ConfigError

if TYPE_CHECKING:
    from mcp import Client

_HTTP_CONNECT_S: Final = 30.0
_HTTP_READ_S: Final = 300.0


def mcp_connection(
    server: str | Sequence[str],
    env: Mapping[str, str] | None,
    cwd: str | None,
    headers: Mapping[str, str] | None,
    protocol: str,
) -> Callable[[], AbstractAsyncContextManager[Client]]:
    """Return what makes a client that is not connected yet; the arguments are those of `McpServer`.

    Raises:
        ConfigError: the SDK is not installed, it does not speak `protocol`, or there is no such command.
    """
    try:
        from mcp import Client
        from mcp.client.stdio import StdioServerParameters, stdio_client
        from mcp.client.streamable_http import streamable_http_client
        from mcp_types.version import MODERN_PROTOCOL_VERSIONS
    except ImportError as error:
        raise ConfigError("McpServer needs the MCP SDK 2 or newer; run `pip install 'agentrl[mcp]'`") from error
    if protocol not in (modes := ("auto", "legacy", *MODERN_PROTOCOL_VERSIONS)):
        raise ConfigError(f"McpServer: protocol must be one of {', '.join(modes)}, got {protocol!r:.40}")
    if isinstance(server, str):
        if not server.startswith(("http://", "https://")):
            raise ConfigError(f"McpServer: a server is a list of words or a URL that starts with http, got {server!r:.200}")
        url, given = server, dict(headers or {})

        @asynccontextmanager
        async def connect() -> AsyncGenerator[Client]:
            from httpx2 import AsyncClient, Timeout  # noqa: TID251 - the SDK's transport takes no other client

            timeout = Timeout(_HTTP_CONNECT_S, read=_HTTP_READ_S)
            async with (
                AsyncClient(headers=given, timeout=timeout) as http,
                Client(streamable_http_client(url, http_client=http), cache=None, mode=protocol) as client,
            ):
                yield client

        return connect
    words = [str(word) for word in server]
    if not words or (shutil.which(words[0], path=(env or {}).get("PATH")) is None and cwd is None):
        raise ConfigError(f"McpServer: there is no command {words[0] if words else ''!r}; got {words}")
    parameters = StdioServerParameters(command=words[0], args=words[1:], env=dict(env or {}), cwd=cwd)
    # The SDK's default is sys.stderr as it was at its import; in a notebook that is no file that a process can write to.
    return lambda: Client(stdio_client(parameters, errlog=sys.__stderr__ or sys.stderr), cache=None, mode=protocol)
