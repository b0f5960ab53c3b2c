"""The routes of the OpenAI API and of Anthropic's Messages, which `agentrl serve` adds to the server's own.

Invariant: calls are stateless; a call that the server cannot hold is refused at once (429). A client that disconnects aborts
what its call samples. Keys and sizes are checked before a route is reached (`agentrl.servers.http.app`).
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Mapping
from contextlib import aclosing, contextmanager, suppress
from functools import partial
from typing import Final

import orjson
from aiohttp import web

from agentrl.client.config import SamplingConfig
from agentrl.errors import AgentRLError
from agentrl.gateway.body import CallRefused, code_of, read_openai_call, status_of
from agentrl.gateway.calls import SingleCalls
from agentrl.gateway.chat import ChatCalls
from agentrl.gateway.completions import TextCalls
from agentrl.gateway.dialect import Dialect
from agentrl.gateway.dialects import MessagesDialect, ResponsesDialect
from agentrl.gateway.dialects.messages import model_entry, model_list
from agentrl.inference.backend import CONTEXT_HEADROOM
from agentrl.servers.engine import InferenceEngine
from agentrl.servers.http.errors import error_reply, json_reply, openai_error, openai_refusal
from agentrl.tokens.renderer import Renderer

MAX_CALLS: Final = 1024
"""Calls that a server holds at once, running and waiting."""
_ROUTES: Final = (
    *("POST /v1/chat/completions", "POST /v1/completions", "POST /v1/responses", "POST /v1/messages"),
    *("POST /v1/messages/count_tokens", "GET /v1/models"),
)
_ANTHROPIC_HEADER: Final = "anthropic-version"
"""The header by which a client says that it reads Anthropic's shapes."""
_EVENT_HEADERS: Final = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
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
    """

    def __init__(self, renderer: Renderer, *, model: str, sampling: SamplingConfig, max_calls: int = MAX_CALLS) -> None:
        self._renderer = renderer
        self._model = model
        self._sampling = sampling
        self._max_calls = max_calls
        self._since = int(time.time())

    def add_to(self, app: web.Application, engine: InferenceEngine) -> None:
        """Add the routes to the application that serves `engine`."""
        context = engine.info.max_context_tokens - CONTEXT_HEADROOM
        sampling = self._sampling.model_copy(update={"max_tokens": context})
        chat, text = ChatCalls(engine, self._renderer, sampling), TextCalls(engine, sampling)
        single = SingleCalls(engine, self._renderer, sampling, model=self._model)
        calls = _Calls(chat, text, single, model=self._model, limit=self._max_calls)
        app.router.add_post("/v1/chat/completions", _answering(calls.chat))
        app.router.add_post("/v1/completions", _answering(calls.text))
        app.router.add_post("/v1/responses", _answering(partial(calls.single, ResponsesDialect())))
        messages = MessagesDialect()
        app.router.add_post("/v1/messages", _answering(partial(calls.single, messages), messages))
        app.router.add_post("/v1/messages/count_tokens", _answering(calls.count_tokens, messages))
        entry = {
            "id": self._model,
            "object": "model",
            "created": self._since,
            "owned_by": "agentrl",
            "root": engine.info.model_path,
            "max_model_len": context,
        }

        async def root(request: web.Request) -> web.Response:
            served = {"object": "server", "model": self._model, "max_model_len": context, "routes": _ROUTES}
            return json_reply({**served, "ignored_fields": single.ignored})

        async def models(request: web.Request) -> web.Response:
            if _ANTHROPIC_HEADER in request.headers:
                return json_reply(model_list([self._model], since=self._since, max_input_tokens=context))
            return json_reply({"object": "list", "data": [entry]})

        async def model(request: web.Request) -> web.Response:
            name = request.match_info["name"]
            if name == self._model and _ANTHROPIC_HEADER in request.headers:
                return json_reply(model_entry(name, since=self._since, max_input_tokens=context))
            if name == self._model:
                return json_reply(entry)
            message = f"there is no model {name!r} here; this server has {self._model!r}"
            return openai_refusal(message, status=404, code="model_not_found")

        app.router.add_get("/", root)
        app.router.add_get("/v1/models", models)
        app.router.add_get("/v1/models/{name:.+}", model)


class _Calls:
    """The calls of one server."""

    def __init__(self, chat: ChatCalls, text: TextCalls, single: SingleCalls, *, model: str, limit: int) -> None:
        self._chat, self._text, self._single, self._model, self._limit = chat, text, single, model, limit
        self._held = 0

    async def chat(self, request: web.Request) -> web.StreamResponse:
        """Answer a chat call."""
        with self._room():
            body = read_openai_call(await request.read(), self._model)
            if not body.stream:
                return json_reply(await self._chat.complete(body))
            async with self._chat.stream(body) as events:
                return await _send_events(request, events)

    async def text(self, request: web.Request) -> web.StreamResponse:
        """Answer a call that continues text or ids."""
        with self._room():
            body = read_openai_call(await request.read(), self._model)
            if not body.stream:
                return json_reply(await self._text.complete(body))
            async with aclosing(self._text.stream(body)) as events:
                return await _send_events(request, events)

    async def single(self, dialect: Dialect, request: web.Request) -> web.StreamResponse:
        """Answer a call of a dialect."""
        with self._room():
            call = self._single.read(dialect, await request.read())
            if not call.stream:
                return json_reply(await self._single.complete(dialect, call))
            async with self._single.stream(dialect, call) as events:
                return await _send_frames(request, events)

    async def count_tokens(self, request: web.Request) -> web.Response:
        """Answer the number of tokens of a call's prompt."""
        with self._room():
            call = self._single.read(MessagesDialect(), await request.read())
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


def _answering(route: Route, dialect: Dialect | None = None) -> Route:
    """Return `route` with its errors as responses in the shape of a dialect; None: in OpenAI's."""

    async def answer(request: web.Request) -> web.StreamResponse:
        try:
            return await route(request)
        except AgentRLError as error:
            status, code = status_of(error), code_of(error)
            shape = openai_error if dialect is None else dialect.refusal
            return error_reply(shape(str(error), status=status, code=code), status=status)

    return answer


async def _send_events(request: web.Request, events: AsyncIterator[Mapping[str, object]]) -> web.StreamResponse:
    """Send events as they come, and return the response.

    Cancellation: the response ends where it is; the owner of `events` aborts what they sample.
    """
    first = await anext(events)
    response = web.StreamResponse(headers=_EVENT_HEADERS)
    with suppress(ConnectionResetError):  # the client has disconnected, so there is no one to answer
        await response.prepare(request)
        await response.write(_event(first))
        try:
            async for event in events:
                await response.write(_event(event))
        except AgentRLError as error:
            await response.write(_event(openai_error(str(error), status=status_of(error), code=code_of(error))))
        else:
            await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
    return response


async def _send_frames(request: web.Request, frames: AsyncIterator[bytes]) -> web.StreamResponse:
    """Send frames as they come, and return the response; `_send_events` says how it ends."""
    first = await anext(frames)
    response = web.StreamResponse(headers=_EVENT_HEADERS)
    with suppress(ConnectionResetError):  # the client has disconnected, so there is no one to answer
        await response.prepare(request)
        await response.write(first)
        async for frame in frames:
            await response.write(frame)
        await response.write_eof()
    return response


def _event(value: Mapping[str, object]) -> bytes:
    return b"data: " + orjson.dumps(value) + b"\n\n"
