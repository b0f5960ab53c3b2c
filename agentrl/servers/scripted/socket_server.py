"""A scripted server on a real socket: agentrl's HTTP app in front of a script, with the faults that only a socket can have.

Invariant: without faults the app alone answers. A fault takes effect between the app and the socket, so the client under
test receives the bytes that a real server with that fault would send.

Example:
    async with serve_scripted(ScriptedServer(script, vocab_size=300)) as http:
        async with SGLangServer(http.url, vocab_size=300) as server:
            generation = await server.generate(request)
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import anyio
import orjson
from aiohttp import web

from agentrl.errors import RequestRejected
from agentrl.servers.engine import EngineRequest
from agentrl.servers.http.app import create_app
from agentrl.servers.http.requests import decode_generate, plan_generate
from agentrl.servers.scripted.engine import ControlCall, ScriptedEngine
from agentrl.servers.scripted.playback import Playback
from agentrl.servers.scripted.script import Fault
from agentrl.servers.scripted.server import ScriptedServer

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_CONTROL: dict[str, ControlCall] = {
    "/server_info": "connect",
    "/model_info": "check",
    "/pause_generation": "pause",
    "/continue_generation": "resume",
    "/update_weights_from_disk": "load_weights",
    "/weights_checker": "checksums",
    "/init_weights_update_group": "join_group",
    "/update_weights_from_distributed": "receive_weights",
}


@dataclass(slots=True)
class ScriptedHTTP:
    """A running scripted server."""

    url: str
    seen: list[tuple[str, bytes]] = field(default_factory=list[tuple[str, bytes]])
    """(path, body) of every request, in order of arrival."""

    def bodies(self, path: str) -> list[Any]:
        """Return the JSON bodies sent to a path."""
        return [orjson.loads(body) for seen, body in self.seen if seen == path]


@asynccontextmanager
async def serve_scripted(
    server: ScriptedServer, *, api_key: str | None = None, sglang_version: str | None = None
) -> AsyncGenerator[ScriptedHTTP, None]:
    """Serve a script on a free loopback port; needs the asyncio event loop.

    With `sglang_version`, the server reports this version of SGLang and hides that it is agentrl's own.
    """
    http = ScriptedHTTP(url="")
    app = create_app(server.engine, api_key=api_key)
    app.middlewares.append(_FaultMiddleware(server.engine, http, sglang_version).middleware)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        http.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        yield http
    finally:
        with anyio.CancelScope(shield=True):  # closes sockets, and waits 0.1 s for handlers
            await runner.cleanup()


class _FaultMiddleware:
    """The middleware that applies faults between the app and the socket."""

    def __init__(self, engine: ScriptedEngine, http: ScriptedHTTP, version: str | None) -> None:
        self._engine, self._http, self._version = engine, http, version

        @web.middleware
        async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
            return await self.handle(request, handler)

        self.middleware = middleware

    async def handle(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        body = await request.read()
        self._http.seen.append((request.path, body))
        if request.path == "/generate" and (asked := self._asked(body)) is not None:
            return await self._generate(request, handler, asked)
        fault = self._engine.control_faults.get(_CONTROL.get(request.path, "score"))
        if (failed := await self._fail(request, fault)) is not None:
            return failed
        response = await handler(request)
        return self._as_version(response) if request.path.endswith("server_info") else response

    def _asked(self, body: bytes) -> EngineRequest | None:
        """Return the request of a model call; None for a score, for several requests, and for what the app refuses."""
        try:
            requests = plan_generate(*decode_generate(body), self._engine.info, self._engine.encode).requests
        except RequestRejected:
            return None
        return requests[0] if len(requests) == 1 and requests[0].sampling.max_new_tokens else None

    async def _generate(self, request: web.Request, handler: Handler, asked: EngineRequest) -> web.StreamResponse:
        playback = self._engine.prepare(asked)
        fault = playback.reply.fault
        if fault in (None, Fault.ABORT):
            return await handler(request)
        try:
            if (failed := await self._fail(request, fault)) is not None:
                return failed
            if fault is Fault.DIE and not asked.stream:
                return self._disconnect(request)
            return await self._play_with_fault(request, playback)
        finally:
            self._engine.withdraw(asked.rid)

    async def _fail(self, request: web.Request, fault: Fault | None) -> web.StreamResponse | None:
        if fault is Fault.REFUSE:
            return self._disconnect(request)
        if fault is Fault.HANG:
            await anyio.sleep_forever()
        if fault is Fault.BAD_REQUEST:
            return web.json_response({"error": {"message": "scripted"}}, status=400)
        if fault is Fault.SERVER_ERROR:
            return web.json_response({"error": {"message": "scripted"}}, status=500)
        if fault is Fault.NOT_JSON:
            return web.Response(text="<html>Bad gateway</html>", content_type="text/html")
        return None

    async def _play_with_fault(self, request: web.Request, playback: Playback) -> web.StreamResponse:
        """Answer in place of the app, with the fault in the reply."""
        fault, stream = playback.reply.fault, playback.progress.request.stream
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream" if stream else "application/json"})
        if stream:
            await response.prepare(request)
        async for progress in playback.tokens():
            if stream and len(progress.output_ids) < len(playback.planned):
                event = {"output_ids": progress.output_ids, "meta_info": {"finish_reason": None}}
                await response.write(b"data: " + orjson.dumps(event) + b"\n\n")
                if fault is Fault.DIE:
                    return self._disconnect(request, response)
        payload = orjson.dumps(playback.body())
        if fault in (Fault.RESET_MID_BODY, Fault.SLOW_DRIP):
            if not stream:
                response.content_length = len(payload)
                await response.prepare(request)
            await response.write(payload[: len(payload) // 2])
            if fault is Fault.SLOW_DRIP:
                await anyio.sleep_forever()
            return self._disconnect(request, response)
        if not stream:
            return web.Response(body=payload, content_type="application/json")
        await response.write(b"data: " + payload + b"\n\ndata: [DONE]\n\n")
        await response.write_eof()
        return response

    def _as_version(self, response: web.StreamResponse) -> web.StreamResponse:
        if self._version is None or not isinstance(response, web.Response) or not isinstance(response.body, bytes):
            return response
        info = cast("dict[str, Any]", orjson.loads(response.body))
        info.pop("engine", None)
        info["version"] = self._version
        return web.Response(body=orjson.dumps(info), content_type="application/json")

    @staticmethod
    def _disconnect(request: web.Request, response: web.StreamResponse | None = None) -> web.StreamResponse:
        if request.transport is not None:
            request.transport.abort()
        return response or web.Response(status=500)
