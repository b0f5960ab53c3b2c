"""The guard before every route: deadlines, the key, and the marks of a web page.

Invariant: with a key no route answers without it; without one no route answers a call that a web page could have sent. Only
paths under `/v1/` are open to pages, and only to those whose origin was named (CORS). No compressed body is read, and each
body arrives in time.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Callable, Iterable
from typing import Final, NamedTuple

import anyio
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from agentrl.errors import ConfigError
from agentrl.servers.listening import Connections, names_loopback

BODY_S: Final = 30.0
"""Seconds that a client has to send the body of a request."""
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


class Refusal(NamedTuple):
    """The reason why no route gets to see a request."""

    status: int
    reason: str


def guard(
    api_key: str | None,
    connections: Connections,
    turn_away: Callable[[web.Request, Refusal], web.Response],
    *,
    body_s: float = BODY_S,
    origins: AllowedOrigins | None = None,
) -> Middleware:
    """Return the middleware that lets a request pass, with its whole body, or turns it away.

    Args:
        api_key: every request must send it, as `Authorization: Bearer <key>` or `x-api-key: <key>`; None: none must.
        connections: of the server, which learn of each request.
        turn_away: makes the response to a refused request.
        body_s: seconds that a client has to send the body of a request.
        origins: of web pages that may call; None: no page may.
    """
    pages = origins or AllowedOrigins()
    expected = None if api_key is None else b"Bearer " + api_key.encode()

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        is_chunked = "Transfer-Encoding" in request.headers
        connections.headers_came(request.protocol, None if is_chunked else request.content_length or 0)
        try:
            if (answer := pages.preflight(request)) is not None:
                return answer
            refusal = _unwanted(request, expected, pages)
            if refusal is None and not await _body_came(request, body_s):
                refusal = Refusal(408, f"the body was not complete after {body_s:g} s")
            if refusal is not None:
                reply = turn_away(request, refusal)
                if refusal.status in (408, 415):
                    reply.force_close()  # what is left of the body is not read
                return reply
            return await handler(request)
        finally:
            connections.answered(request.protocol)

    return check


def _unwanted(request: web.Request, expected: bytes | None, pages: AllowedOrigins) -> Refusal | None:
    if expected is not None:
        header = request.headers.get("Authorization") or f"Bearer {request.headers.get('x-api-key', '')}"
        if not hmac.compare_digest(header.encode("utf-8", "surrogateescape"), expected):
            return Refusal(401, "this server requires a key: send Authorization: Bearer <key>, or x-api-key: <key>")
    elif (why := _foreign(request, pages)) is not None:
        return Refusal(403, f"{why}; a server without a key answers programs of this machine only")
    encoding = request.headers.get("Content-Encoding", "identity")
    if encoding != "identity":
        return Refusal(415, f"Content-Encoding {encoding!r} is not read here: send the body as it is")
    return None


async def _body_came(request: web.Request, seconds: float) -> bool:
    """Return whether the whole body has come in time; the request keeps it for its handler."""
    with anyio.move_on_after(seconds) as wait:
        await request.read()
    return not wait.cancelled_caught


def _foreign(request: web.Request, pages: AllowedOrigins) -> str | None:
    """Return what shows that a web page sent the request, which needs no key; None for a program's own.

    A page can send requests to this machine, but it cannot hide its origin or its site, name another host than its own in
    `Host`, or send JSON without the server's consent.
    """
    host = request.headers.get("Host", "")
    if not names_loopback(host):
        return f"Host {host!r} is not this machine"
    if not pages.admit(request):
        origin, site = request.headers.get("Origin"), request.headers.get("Sec-Fetch-Site")
        if origin is not None and origin != f"http://{host}":
            return f"Origin {origin!r} is another site"
        if site is not None and site not in ("none", "same-origin"):  # of a GET without an origin, as for an image
            return f"Sec-Fetch-Site {site!r} is another site"
    if request.can_read_body and request.content_type != "application/json":
        return f"Content-Type {request.content_type!r} is not application/json"
    return None
