"""A resource server in the manner of NeMo Gym's example of a counter: sessions by cookie, tools by route, `/verify`.

The bodies that it gets are checked with the models of the openai package, which those of NeMo Gym extend.
"""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web
from openai.types.responses import Response, ResponseCreateParams
from pydantic import TypeAdapter

PARAMS: TypeAdapter[Any] = TypeAdapter(ResponseCreateParams)


class CounterServer:
    """What the server knows."""

    def __init__(self) -> None:
        self.url = ""
        self.counters: dict[str, int] = {}
        self.verified: list[dict[str, Any]] = []
        self.verdict: dict[str, Any] = {}
        """What `/verify` answers beside the reward."""

    async def answer(self, request: web.Request) -> web.Response:
        session = request.cookies.get("session") or uuid.uuid4().hex
        route = request.match_info["route"]
        status, reply = getattr(self, f"on_{route}", self.on_missing)(session, await request.json())
        response = web.json_response(reply, status=status)
        response.set_cookie("session", session)
        return response

    def on_missing(self, session: str, body: dict[str, Any]) -> tuple[int, Any]:
        return 404, {"detail": "Not Found"}

    def on_seed_session(self, session: str, body: dict[str, Any]) -> tuple[int, Any]:
        PARAMS.validate_python({"model": "policy", **body["responses_create_params"]})
        if "initial_count" not in body:
            return 422, {"detail": "initial_count is required"}
        self.counters[session] = body["initial_count"]
        return 200, {}

    def on_increment_counter(self, session: str, body: dict[str, Any]) -> tuple[int, Any]:
        if not isinstance(body.get("count"), int):
            return 422, {"detail": "count must be an integer"}
        self.counters[session] += body["count"]
        return 200, {"success": True}

    def on_get_counter_value(self, session: str, body: dict[str, Any]) -> tuple[int, Any]:
        return 200, {"count": self.counters[session], "padding": "a" * body.get("padding", 0)}

    def on_break(self, session: str, body: dict[str, Any]) -> tuple[int, Any]:
        return 500, {"detail": "the disk is full"}

    def on_verify(self, session: str, body: dict[str, Any]) -> tuple[int, Any]:
        Response.model_validate(body["response"], strict=False)
        self.verified.append(body)
        return 200, {**body, "reward": float(self.counters[session] == body["expected_count"]), **self.verdict}


@asynccontextmanager
async def counter_server() -> AsyncGenerator[CounterServer]:
    """Serve for the length of the block; needs the asyncio event loop."""
    server = CounterServer()
    app = web.Application()
    app.router.add_post("/{route}", server.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield server
    finally:
        await runner.cleanup()
