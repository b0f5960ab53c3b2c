"""The HTTP server: SGLang's native protocol over an `InferenceEngine`, as an aiohttp application.

Invariant: the server answers each accepted call once. With a key set it answers no call without the key; without one it
answers no call that a web page could have sent. The modules `generate`, `control` and `adapter_routes` define the routes.
One conformance suite (tests/conformance) runs against this server and against a real SGLang; `servers.embedded.faults` lists
the differences and their reasons.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Final, TypeAlias

from aiohttp import web
from aiohttp.typedefs import Handler

from agentrl.errors import RequestRejected
from agentrl.servers.engine import InferenceEngine
from agentrl.servers.http.adapter_routes import AdapterRoutes
from agentrl.servers.http.control import ControlRoutes, GroupRoutes, InfoRoutes
from agentrl.servers.http.errors import error_reply, json_reply, openai_error, refusal
from agentrl.servers.http.generate import GenerateRoute
from agentrl.servers.listening import BODY_S, AllowedOrigins, Connections, Refusal, guard

_MAX_BODY_BYTES: Final = 32 * 2**20
_OPENAI: Final = "/v1/"
"""The paths whose errors have OpenAI's shape."""
_ANTHROPIC: Final = "/v1/messages"
"""The paths whose errors have Anthropic's shape, too."""
AddRoutes: TypeAlias = Callable[[web.Application, InferenceEngine], None]
"""Adds further routes over the engine of a server to its application."""


def create_app(
    engine: InferenceEngine,
    *,
    api_key: str | None = None,
    blocking_health: bool = False,
    connections: Connections | None = None,
    body_s: float = BODY_S,
    add_routes: AddRoutes | None = None,
    origins: AllowedOrigins | None = None,
) -> web.Application:
    """Return the application, which runs the engine from start-up to clean-up.

    Serve it with `handler_cancellation=True`, as `agentrl.servers.serve.serving` does; without that, requests of
    disconnected clients are never aborted.

    Args:
        engine: samples the tokens.
        api_key: every call must send it, as `Authorization: Bearer <key>` or `x-api-key: <key>`; None: none must.
        blocking_health: `/health` waits for a token, as `SGLangFault.BLOCKING_HEALTH` describes.
        connections: learn of each request; None: no deadline holds for headers.
        body_s: seconds that a client has to send the body of a request.
        add_routes: adds routes beside SGLang's own, such as those of `agentrl_doors.gateway`.
        origins: of web pages that may call the OpenAI API; None: no page may.
    """
    check = guard(api_key, connections or Connections(), _turned_away, body_s=body_s, origins=origins)
    app = web.Application(client_max_size=_MAX_BODY_BYTES, middlewares=[_errors_as_json, check])
    if origins is not None:
        app.on_response_prepare.append(origins.mark)
    GenerateRoute(engine).add_to(app)
    ControlRoutes(engine).add_to(app)
    GroupRoutes(engine.groups).add_to(app)
    AdapterRoutes(engine.adapters).add_to(app)
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


@web.middleware
async def _errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except RequestRejected as error:
        return refusal(error)
    except web.HTTPException as error:
        if request.path.startswith(_OPENAI):
            return _refused_call(request, _unrouted(request, error), error.status)
        return json_reply({"detail": error.reason}, status=error.status)


def _turned_away(request: web.Request, refused: Refusal) -> web.Response:
    """Return the response to a request that no route gets to see."""
    if request.path.startswith(_OPENAI):
        return _refused_call(request, refused.reason, refused.status)
    return json_reply({"error": refused.reason}, status=refused.status)


def _refused_call(request: web.Request, message: str, status: int) -> web.Response:
    """Return a refusal in OpenAI's shape; `/v1/messages` adds `type: error`, which makes it Anthropic's, too."""
    marked = {"type": "error"} if request.path.startswith(_ANTHROPIC) else {}
    return error_reply({**marked, **openai_error(message, status=status)}, status=status)


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
