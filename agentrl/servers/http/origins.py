"""Web pages of other origins that may call the OpenAI API of a server, by name (CORS).

Invariant: only paths under `/v1/` are open to a page, and only to one whose origin was named.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

from aiohttp import web

from agentrl.errors import ConfigError

_OPEN: Final = "/v1/"
_ORIGIN: Final = re.compile(r"https?://[a-z0-9.-]+(:\d{1,5})?|https?://\[[0-9a-f:]+\](:\d{1,5})?")


class AllowedOrigins:
    """The origins of pages that may call a server."""

    def __init__(self, names: Iterable[str] = ()) -> None:
        self._names = frozenset(names)
        for name in self._names:
            if _ORIGIN.fullmatch(name) is None:
                raise ConfigError(f"--allow-origin: expected an origin such as http://localhost:3000, got {name!r}")

    def admit(self, request: web.Request) -> bool:
        """Return whether a page of a named origin sent the request, to a path that is open to it."""
        return request.path.startswith(_OPEN) and request.headers.get("Origin") in self._names

    def preflight(self, request: web.Request) -> web.Response | None:
        """Return the answer to a browser that asks whether a page may call; None for any other request."""
        if request.method != "OPTIONS" or not self.admit(request):
            return None
        allowed = {"Access-Control-Allow-Methods": "GET, POST", "Access-Control-Max-Age": "600"}
        asked = request.headers.get("Access-Control-Request-Headers", "authorization, content-type")
        return web.Response(status=204, headers={**allowed, "Access-Control-Allow-Headers": asked})

    async def mark(self, request: web.Request, response: web.StreamResponse) -> None:
        """Tell the browser that the page may read the response."""
        if self.admit(request):
            response.headers["Access-Control-Allow-Origin"] = request.headers["Origin"]
            response.headers["Vary"] = "Origin"
