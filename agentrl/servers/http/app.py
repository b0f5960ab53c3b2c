"""The HTTP server: SGLang's native protocol over an `InferenceEngine`, as an aiohttp application.

Invariant: the server answers each accepted call once. With a key set it answers no call without the key; without one it
answers no call that a web page could have sent. The modules
`generate`, `control` and `info` define the routes. One conformance suite (tests/conformance) runs against this server and
against a real SGLang; `servers.embedded.faults` lists the differences and their reasons.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import AsyncIterator, Callable
from typing import Final, TypeAlias

import anyio
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from agentrl.errors import RequestRejected
from agentrl.servers.engine import InferenceEngine
from agentrl.servers.http.control import ControlRoutes, GroupRoutes
from agentrl.servers.http.errors import json_reply, openai_refusal, refusal
from agentrl.servers.http.generate import GenerateRoute
from agentrl.servers.http.info import InfoRoutes
from agentrl.servers.loopback import names_loopback

_MAX_BODY_BYTES: Final = 32 * 2**20
BODY_S: Final = 30.0
"""Seconds that a client has to send the body of a request."""
_OPENAI: Final = "/v1/"
"""The paths whose errors have OpenAI's shape."""
AddRoutes: TypeAlias = Callable[[web.Application, InferenceEngine], None]
"""Adds further routes over the engine of a server to its application."""


def create_app(
    engine: InferenceEngine,
    *,
    api_key: str | None = None,
    blocking_health: bool = False,
    on_request: Callable[[asyncio.BaseProtocol], None] = lambda connection: None,
    body_s: float = BODY_S,
    add_routes: AddRoutes | None = None,
) -> web.Application:
    """Return the application, which runs the engine from start-up to clean-up.

    Serve it with `handler_cancellation=True`, as `agentrl.servers.serve.serving` does; without that, requests of
    disconnected clients are never aborted.

    Args:
        engine: samples the tokens.
        api_key: every call must send it as `Authorization: Bearer <key>`; None: no call needs a key.
        blocking_health: `/health` waits for a token, as `SGLangFault.BLOCKING_HEALTH` describes.
        on_request: called with the connection of each request, when its headers have come.
        body_s: seconds that a client has to send the body of a request.
        add_routes: adds routes beside SGLang's own, such as those of `agentrl.gateway`.
    """
    app = web.Application(client_max_size=_MAX_BODY_BYTES, middlewares=[_guard(api_key, on_request, body_s)])
    GenerateRoute(engine).add_to(app)
    ControlRoutes(engine).add_to(app)
    GroupRoutes(engine.groups).add_to(app)
    InfoRoutes(engine, blocking_health=blocking_health).add_to(app)
    if add_routes is not None:
        add_routes(app, engine)

    async def run_engine(_: web.Application) -> AsyncIterator[None]:
        # aiohttp may enter and leave this in different cancel scopes, which an anyio task group does not allow. If the
        # engine fails, the group cancels the task that started the server, and clean-up raises the engine's error.
        async with asyncio.TaskGroup() as group:
            task = group.create_task(engine.run())
            yield
            task.cancel()

    app.cleanup_ctx.append(run_engine)
    return app


def _guard(api_key: str | None, on_request: Callable[[asyncio.BaseProtocol], None], body_s: float) -> Middleware:
    """Return the middleware that checks the key, waits for the body, and turns errors into JSON."""
    expected = None if api_key is None else b"Bearer " + api_key.encode()

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        on_request(request.protocol)
        if expected is not None:
            given = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
            if not hmac.compare_digest(given, expected):
                return _turned_away(request, 401, "this server requires a key: send Authorization: Bearer <key>")
        elif (why := _foreign(request)) is not None:
            return _turned_away(request, 403, f"{why}; a server without a key answers programs of this machine only")
        try:
            if not await _body_came(request, body_s):
                reply = _turned_away(request, 408, f"the body was not complete after {body_s:g} s")
                reply.force_close()
                return reply
            return await handler(request)
        except RequestRejected as error:
            return refusal(error)
        except web.HTTPException as error:
            if request.path.startswith(_OPENAI):
                return openai_refusal(_unrouted(request, error), status=error.status)
            return json_reply({"detail": error.reason}, status=error.status)

    return guard


def _turned_away(request: web.Request, status: int, message: str) -> web.Response:
    """Return the response to a request that no route gets to see."""
    if request.path.startswith(_OPENAI):
        return openai_refusal(message, status=status)
    return json_reply({"error": message}, status=status)


def _unrouted(request: web.Request, error: web.HTTPException) -> str:
    """Return the message for a call of the OpenAI API that no route answers, or that is too large."""
    if isinstance(error, web.HTTPRequestEntityTooLarge):
        return f"the body is larger than the {_MAX_BODY_BYTES} bytes that this server reads; send a shorter conversation"
    if not isinstance(error, (web.HTTPNotFound, web.HTTPMethodNotAllowed)):
        return error.reason
    routes = {f"{route.method} {route.resource.canonical}" for route in request.app.router.routes() if route.resource}
    there = sorted(route for route in routes if _OPENAI in route and not route.startswith("HEAD "))
    hint = "" if len(there) > 1 else "; `agentrl serve CHECKPOINT` starts a server with the OpenAI API"
    return f"there is no {request.method} {request.path} here; there is {', '.join(there)}{hint}"


async def _body_came(request: web.Request, seconds: float) -> bool:
    """Return whether the whole body has come in time; the request keeps it for its handler."""
    with anyio.move_on_after(seconds) as wait:
        await request.read()
    return not wait.cancelled_caught


def _foreign(request: web.Request) -> str | None:
    """Return what shows that a web page sent the request, which needs no key; None for a program's own.

    A page can send requests to this machine, but it cannot hide its origin, name another host than its own in `Host`, or
    send JSON without the server's consent.
    """
    host = request.headers.get("Host", "")
    if not names_loopback(host):
        return f"Host {host!r} is not this machine"
    origin = request.headers.get("Origin")
    if origin is not None and origin != f"http://{host}":
        return f"Origin {origin!r} is another site"
    if request.can_read_body and request.content_type != "application/json":
        return f"Content-Type {request.content_type!r} is not application/json"
    return None
