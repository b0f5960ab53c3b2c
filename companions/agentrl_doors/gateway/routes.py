"""The routes of the OpenAI API and of Anthropic's Messages, which `agentrl serve` adds to the server's own.

Invariant: calls are stateless; a call that the server cannot hold is refused at once (429). A client that disconnects aborts
what its call samples. Keys and sizes are checked before a route is reached (`agentrl.servers.http.app`).
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager
from functools import partial
from typing import Final

from aiohttp import web

from agentrl.client.config import SamplingConfig
from agentrl.inference.backend import CONTEXT_HEADROOM
from agentrl.servers.engine import InferenceEngine
from agentrl.servers.http.errors import json_reply
from agentrl.tokens.renderer import Renderer
from agentrl_doors.gateway.calls import SingleCalls
from agentrl_doors.gateway.completions import TextCalls
from agentrl_doors.gateway.dialect import Dialect
from agentrl_doors.gateway.dialects import CHAT_ROUTE, COUNT_ROUTE, COUNTED, DIALECTS, ChatDialect
from agentrl_doors.gateway.dialects.answers import ChunkSigns
from agentrl_doors.gateway.dialects.messages.dialect import model_entry, model_list
from agentrl_doors.gateway.event_stream import KEEP_ALIVE_S, send_events
from agentrl_doors.gateway.fields import IgnoredFields, check_model
from agentrl_doors.gateway.refusals import CallRefused, refusal_reply

MAX_CALLS: Final = 1024
"""Calls that a server holds at once, running and waiting."""
_DIALECTS: Final = {**DIALECTS, CHAT_ROUTE: ChatDialect(untrained=True)}
_ANTHROPIC_HEADER: Final = "anthropic-version"
"""The header by which a client says that it reads Anthropic's shapes."""
Route = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Gateway:
    """Answers the OpenAI API for one model.

    Example: `Gateway(renderer, model="demo", sampling=SamplingConfig()).add_to(app, engine)`. The function
    `agentrl.servers.serve.serving` takes `add_to` as `add_routes`.

    Args:
        renderer: chat template and tokenizer of the model.
        model: its name in the API.
        sampling: the default of each sampling argument that a call leaves out; the default of `max_tokens` is what the
            context leaves.
        max_calls: calls held at once; further ones are refused (429).
        keep_alive_s: seconds of the longest silence of a stream.
    """

    def __init__(
        self,
        renderer: Renderer,
        *,
        model: str,
        sampling: SamplingConfig,
        max_calls: int = MAX_CALLS,
        keep_alive_s: float = KEEP_ALIVE_S,
    ) -> None:
        self._renderer = renderer
        self._model = model
        self._sampling = sampling
        self._max_calls, self._keep_alive_s = max_calls, keep_alive_s
        self._since = int(time.time())

    def add_to(self, app: web.Application, engine: InferenceEngine) -> None:
        """Add the routes to the application that serves `engine`."""
        context = engine.info.max_context_tokens - CONTEXT_HEADROOM
        sampling = self._sampling.model_copy(update={"max_tokens": context})
        text = TextCalls(engine, sampling, model=self._model)
        single = SingleCalls(engine, self._renderer, sampling, model=self._model)
        calls = _Calls(text, single, limit=self._max_calls, keep_alive_s=self._keep_alive_s)
        routes: dict[str, tuple[Dialect, Route]] = {
            route: (dialect, partial(calls.answer, dialect)) for route, dialect in _DIALECTS.items()
        }
        routes["completions"] = _DIALECTS[CHAT_ROUTE], calls.answer_text
        routes[COUNT_ROUTE] = COUNTED, calls.count_tokens
        for route, (dialect, answer) in routes.items():
            app.router.add_post(f"/v1/{route}", _answering(answer, dialect))
        entry = {
            "id": self._model,
            "object": "model",
            "created": self._since,
            "owned_by": "agentrl",
            "root": engine.info.model_path,
            "max_model_len": context,
        }

        async def root(request: web.Request) -> web.Response:
            there = [*(f"POST /v1/{route}" for route in routes), "GET /v1/models"]
            served = {"object": "server", "model": self._model, "max_model_len": context, "routes": there}
            return json_reply({**served, "ignored_fields": calls.ignored})

        async def models(request: web.Request) -> web.Response:
            if _ANTHROPIC_HEADER in request.headers:
                return json_reply(model_list([self._model], since=self._since, max_input_tokens=context))
            return json_reply({"object": "list", "data": [entry]})

        async def model(request: web.Request) -> web.Response:
            name = request.match_info["name"]
            check_model(name, self._model)
            if _ANTHROPIC_HEADER in request.headers:
                return json_reply(model_entry(name, since=self._since, max_input_tokens=context))
            return json_reply(entry)

        app.router.add_get("/", root)
        app.router.add_get("/v1/models", models)
        app.router.add_get("/v1/models/{name:.+}", _answering(model, _DIALECTS[CHAT_ROUTE]))


class _Calls:
    """The calls of one server."""

    def __init__(self, text: TextCalls, single: SingleCalls, *, limit: int, keep_alive_s: float) -> None:
        self._text, self._single, self._limit, self._keep_alive_s = text, single, limit, keep_alive_s
        self._held = 0
        self.ignored: dict[str, float] = {}
        """Calls by the fields in them that have no effect."""
        self._ignored = IgnoredFields(self.ignored)

    async def answer(self, dialect: Dialect, request: web.Request) -> web.StreamResponse:
        """Answer a call of a dialect."""
        with self._room():
            call = self._single.read(dialect, await request.read())
            self._ignored.count(call.ignored)
            if not call.stream:
                return json_reply(await self._single.complete(dialect, call))
            async with self._single.stream(dialect, call) as (frames, writer):
                return await send_events(request, frames, lambda: writer, interval_s=self._keep_alive_s)

    async def answer_text(self, request: web.Request) -> web.StreamResponse:
        """Answer a call that continues text or ids."""
        with self._room():
            call = self._text.read(await request.read())
            self._ignored.count(call.ignored)
            if not call.stream:
                return json_reply(await self._text.complete(call))
            return await send_events(request, self._text.stream(call), ChunkSigns, interval_s=self._keep_alive_s)

    async def count_tokens(self, request: web.Request) -> web.Response:
        """Answer the number of tokens of a call's prompt."""
        with self._room():
            call = self._single.read(COUNTED, await request.read())
            return json_reply({"input_tokens": self._single.count_tokens(call)})

    @contextmanager
    def _room(self) -> Generator[None]:
        """Count a call while it runs or waits."""
        if self._held >= self._limit:
            raise CallRefused(f"{self._held} calls run or wait, the most that this server holds; call again", status=429)
        self._held += 1
        try:
            yield
        finally:
            self._held -= 1


def _answering(route: Route, dialect: Dialect) -> Route:
    """Return `route` with its errors as responses in the shape of a dialect."""

    async def answer(request: web.Request) -> web.StreamResponse:
        try:
            return await route(request)
        except (web.HTTPException, ConnectionResetError):
            raise
        except Exception as error:  # noqa: BLE001 - the client learns of it in the words of its dialect
            return refusal_reply(error, dialect)

    return answer
