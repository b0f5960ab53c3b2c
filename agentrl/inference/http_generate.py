"""`/generate`: one HTTP call, the engine requests it asks for, and its answer, whole or streamed.

Invariant: an engine request never outlives the call that made it: a client that disconnects aborts it. Who waits for whom:
a call waits, without limit, for its engine requests; the client's deadline is the limit, and its disconnect the release.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import anyio
from aiohttp import web

from agentrl.errors import RequestRejected
from agentrl.inference.engine import Engine, EngineRequest, Progress
from agentrl.inference.http_errors import dumps, error_event, json_reply
from agentrl.inference.http_reply import reply
from agentrl.inference.http_wire import GenerateCall, decode_generate, plan_generate

_EVENTS = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}


class News:
    """Something happened to one of a call's requests."""

    def __init__(self) -> None:
        self._event = anyio.Event()

    def tell(self) -> None:
        """Wake who waits."""
        self._event.set()

    async def wait(self) -> None:
        """Wait for what has happened since the last wait."""
        await self._event.wait()
        self._event = anyio.Event()


class Waiter:
    """The sink of one engine request."""

    def __init__(self, news: News) -> None:
        """Report to `news`."""
        self._news = news
        self.latest: Progress | None = None
        self.done = False
        self.sent = -1
        """Output ids in the last streamed event; -1 before the first."""

    def progress(self, progress: Progress) -> None:
        """See `Sink.progress`."""
        self.latest = progress
        self._news.tell()

    def finish(self, progress: Progress) -> None:
        """See `Sink.finish`."""
        self.latest, self.done = progress, True
        self._news.tell()

    def due(self, interval: int) -> bool:
        """Return whether there is something to stream: the end, the first tokens, or `interval` more of them."""
        if self.latest is None or self.sent == (end := len(self.latest.output_ids) + self.done):
            return False
        return self.done or self.sent < 0 or end - self.sent >= interval


class GenerateRoute:
    """Answers `/generate`."""

    def __init__(self, engine: Engine) -> None:
        """Serve the engine's tokens."""
        self._engine = engine

    def add_to(self, app: web.Application) -> None:
        """Add the route; SGLang takes PUT as well."""
        app.router.add_post("/generate", self.generate)
        app.router.add_put("/generate", self.generate)

    async def generate(self, request: web.Request) -> web.StreamResponse:
        """Answer one call; what is wrong with a streamed one is told in the stream, as at SGLang."""
        started = time.perf_counter()
        sent, params = decode_generate(await request.read())
        flying: list[tuple[EngineRequest, Waiter]] = []
        news = News()
        try:
            try:
                call = plan_generate(sent, params, self._engine.info, self._engine.encode)
                for one in call.requests:
                    waiter = Waiter(news)
                    self._engine.submit(one, waiter)
                    flying.append((one, waiter))
            except RequestRejected as error:
                if not sent.stream:
                    raise
                return web.Response(body=error_event(error), headers=_EVENTS)
            waiters = [waiter for _, waiter in flying]
            if sent.stream:
                return await self._stream(request, call, waiters, news, started)
            while not all(waiter.done for waiter in waiters):
                await news.wait()
            replies = [self._reply(call, index, waiter, started) for index, waiter in enumerate(waiters)]
        finally:
            for one, waiter in flying:
                if not waiter.done:
                    self._engine.abort(one.rid, exact=True)
        return json_reply(replies if call.batched else replies[0])

    async def _stream(
        self, request: web.Request, call: GenerateCall, waiters: Sequence[Waiter], news: News, started: float
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers=_EVENTS)
        await response.prepare(request)
        with suppress(ConnectionResetError):  # the client is gone: nobody is left to answer
            await self._send_events(response, call, waiters, news, started)
        return response

    async def _send_events(
        self, response: web.StreamResponse, call: GenerateCall, waiters: Sequence[Waiter], news: News, started: float
    ) -> None:
        while not all(waiter.done for waiter in waiters) or any(waiter.due(1) for waiter in waiters):
            await news.wait()
            for index, waiter in enumerate(waiters):
                if not waiter.due(call.stream_interval):
                    continue
                event = self._reply(call, index, waiter, started, stamped=waiter.sent < 0)
                if call.batched:
                    event["index"] = index
                waiter.sent = len(event["output_ids"]) + waiter.done
                await response.write(b"data: " + dumps(event) + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()

    def _reply(
        self, call: GenerateCall, index: int, waiter: Waiter, started: float, *, stamped: bool = True
    ) -> dict[str, Any]:
        assert waiter.latest is not None
        skip = waiter.latest.request.sampling.skip_special_tokens
        return reply(
            waiter.latest,
            lambda ids: self._engine.decode(ids, skip_special_tokens=skip),
            logprobs=call.return_logprob[index],
            prompt_ids=call.return_prompt_ids,
            weight_version=self._engine.info.weight_version,
            seconds=time.perf_counter() - started,
            stamped=stamped,
        )
