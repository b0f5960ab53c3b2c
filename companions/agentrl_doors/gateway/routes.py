"""The routes of the OpenAI API and of Anthropic's Messages, which `agentrl serve` adds to the server's own.

Invariant: calls are stateless; a call that the server cannot hold is refused at once (429). A client that disconnects aborts
what its call samples. Keys and sizes are checked before a route is reached (`agentrl.servers.http.app`).
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Generator, Mapping
from contextlib import aclosing, contextmanager
from functools import partial
from typing import Final

from aiohttp import web

from agentrl.client.config import SamplingConfig
from agentrl.errors import AgentRLError
from agentrl.inference.backend import CONTEXT_HEADROOM
from agentrl.servers.engine import InferenceEngine
from agentrl.servers.http.errors import error_reply, json_reply, openai_error, openai_refusal
from agentrl.tokens.renderer import Renderer
from agentrl_doors.gateway.body import CHAT_FIELDS, CallRefused, OpenAICall, code_of, read_openai_call, status_of
from agentrl_doors.gateway.calls import SingleCalls
from agentrl_doors.gateway.chat import ChatCalls
from agentrl_doors.gateway.completions import TEXT_FIELDS, TextCalls
from agentrl_doors.gateway.dialect import Dialect, DialectCall
from agentrl_doors.gateway.dialects import MessagesDialect, ResponsesDialect
from agentrl_doors.gateway.dialects.answers import frame
from agentrl_doors.gateway.dialects.messages import model_entry, model_list
from agentrl_doors.gateway.event_stream import KEEP_ALIVE_S, event_response
from agentrl_doors.gateway.ignored import IgnoredFields
from agentrl_doors.gateway.unexpected import unexpected_error

MAX_CALLS: Final = 1024
"""Calls that a server holds at once, running and waiting."""
_ROUTES: Final = (
    *("POST /v1/chat/completions", "POST /v1/completions", "POST /v1/responses", "POST /v1/messages"),
    *("POST /v1/messages/count_tokens", "GET /v1/models"),
)
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
        chat, text = ChatCalls(engine, self._renderer, sampling), TextCalls(engine, sampling)
        single = SingleCalls(engine, self._renderer, sampling, model=self._model)
        calls = _Calls(chat, text, single, model=self._model, limit=self._max_calls, keep_alive_s=self._keep_alive_s)
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
            return json_reply({**served, "ignored_fields": calls.ignored})

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

    def __init__(
        self, chat: ChatCalls, text: TextCalls, single: SingleCalls, *, model: str, limit: int, keep_alive_s: float
    ) -> None:
        self._chat, self._text, self._single, self._model, self._limit = chat, text, single, model, limit
        self._keep_alive_s = keep_alive_s
        self._held = 0
        self.ignored: dict[str, float] = {}
        """Calls by the fields in them that have no effect."""
        self._ignored = IgnoredFields(self.ignored)

    async def chat(self, request: web.Request) -> web.StreamResponse:
        """Answer a chat call."""
        with self._room():
            body = await self._openai_call(request, CHAT_FIELDS)
            if not body.stream:
                return json_reply(await self._chat.complete(body))
            async with self._chat.stream(body) as events:
                return await _send_events(request, events, self._keep_alive_s)

    async def text(self, request: web.Request) -> web.StreamResponse:
        """Answer a call that continues text or ids."""
        with self._room():
            body = await self._openai_call(request, TEXT_FIELDS)
            if not body.stream:
                return json_reply(await self._text.complete(body))
            async with aclosing(self._text.stream(body)) as events:
                return await _send_events(request, events, self._keep_alive_s)

    async def single(self, dialect: Dialect, request: web.Request) -> web.StreamResponse:
        """Answer a call of a dialect."""
        with self._room():
            call = self._single.read(dialect, await request.read())
            self._ignored.count(call.ignored)
            if not call.stream:
                return json_reply(await self._single.complete(dialect, call))
            async with self._single.stream(dialect, call) as events:
                return await _send_frames(request, dialect, call, events, self._keep_alive_s)

    async def count_tokens(self, request: web.Request) -> web.Response:
        """Answer the number of tokens of a call's prompt."""
        with self._room():
            call = self._single.read(MessagesDialect(takes_prefill=True), await request.read())
            return json_reply({"input_tokens": self._single.count_tokens(call)})

    async def _openai_call(self, request: web.Request, known: Collection[str]) -> OpenAICall:
        """Return the body of a call, its ignored fields counted."""
        body = read_openai_call(await request.read(), self._model, known)
        self._ignored.count(body.ignored)
        return body

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
        except (web.HTTPException, ConnectionResetError):
            raise
        except Exception as error:  # noqa: BLE001 - the client learns of it in the words of its dialect
            known = error if isinstance(error, AgentRLError) else unexpected_error(error)
            status, code = status_of(known), code_of(known)
            shape = openai_error if dialect is None else dialect.refusal
            return error_reply(shape(str(known), status=status, code=code), status=status)

    return answer


async def _send_events(
    request: web.Request, events: AsyncIterator[Mapping[str, object]], interval_s: float
) -> web.StreamResponse:
    """Send events as they come, and return the response.

    Cancellation: the response ends where it is; the owner of `events` aborts what they sample.
    """
    async with event_response(request, {}, interval_s=interval_s) as response:
        try:
            async for event in events:
                await response.send([frame(event)])
        except ConnectionResetError:
            raise
        except Exception as error:  # noqa: BLE001 - the client learns of it in OpenAI's shape
            known = error if isinstance(error, AgentRLError) else unexpected_error(error)
            shown = openai_error(str(known), status=status_of(known), code=code_of(known))
            await response.fail(known, lambda: [frame(shown)])
        else:
            await response.send([b"data: [DONE]\n\n"])
    return response.response


async def _send_frames(
    request: web.Request, dialect: Dialect, call: DialectCall, frames: AsyncIterator[bytes], interval_s: float
) -> web.StreamResponse:
    """Send frames as they come, and return the response; `_send_events` says how it ends."""
    async with event_response(request, {}, interval_s=interval_s) as response:
        writer = dialect.events(call, "")
        try:
            async for each in frames:
                response.sign = writer.sign()
                await response.send([each])
        except ConnectionResetError:
            raise
        except Exception as error:  # noqa: BLE001 - the client learns of it in the words of its dialect
            known = error if isinstance(error, AgentRLError) else unexpected_error(error)
            await response.fail(known, lambda: writer.fail(str(known), status=status_of(known), code=code_of(known)))
    return response.response
