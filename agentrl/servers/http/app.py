"""The HTTP server: SGLang's native protocol over an `InferenceEngine`, as an aiohttp application.

Invariant: the server answers each accepted call once, and with a key set it answers no call without the key. The modules
`generate`, `control` and `info` define the routes. One conformance suite (tests/conformance) runs against this server and
against a real SGLang; `servers.embedded.faults` lists the differences and their reasons.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import AsyncIterator
from typing import Final

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from agentrl.errors import RequestRejected
from agentrl.servers.engine import InferenceEngine
from agentrl.servers.http.control import ControlRoutes, GroupRoutes
from agentrl.servers.http.errors import json_reply, refusal
from agentrl.servers.http.generate import GenerateRoute
from agentrl.servers.http.info import InfoRoutes

_MAX_BODY_BYTES: Final = 32 * 2**20


def create_app(engine: InferenceEngine, *, api_key: str | None = None, blocking_health: bool = False) -> web.Application:
    """Return the application, which runs the engine from start-up to clean-up.

    Serve it with `handler_cancellation=True`, as `agentrl.servers.serve.serving` does; without that, requests of
    disconnected clients are never aborted.

    Args:
        engine: samples the tokens.
        api_key: every call must send it as `Authorization: Bearer <key>`; None: no call needs a key.
        blocking_health: `/health` waits for a token, as `SGLangFault.BLOCKING_HEALTH` describes.
    """
    app = web.Application(client_max_size=_MAX_BODY_BYTES, middlewares=[_guard(api_key)])
    GenerateRoute(engine).add_to(app)
    ControlRoutes(engine).add_to(app)
    GroupRoutes(engine.groups).add_to(app)
    InfoRoutes(engine, blocking_health=blocking_health).add_to(app)

    async def run_engine(_: web.Application) -> AsyncIterator[None]:
        # aiohttp may enter and leave this in different cancel scopes, which an anyio task group does not allow. If the
        # engine fails, the group cancels the task that started the server, and clean-up raises the engine's error.
        async with asyncio.TaskGroup() as group:
            task = group.create_task(engine.run())
            yield
            task.cancel()

    app.cleanup_ctx.append(run_engine)
    return app


def _guard(api_key: str | None) -> Middleware:
    """Return the middleware that checks the key and turns errors into JSON."""
    expected = None if api_key is None else b"Bearer " + api_key.encode()

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        if expected is not None:
            given = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
            if not hmac.compare_digest(given, expected):
                return json_reply({"error": "this server requires a key: send Authorization: Bearer <key>"}, status=401)
        try:
            return await handler(request)
        except RequestRejected as error:
            return refusal(error)
        except web.HTTPException as error:
            return json_reply({"detail": error.reason}, status=error.status)

    return guard
