"""`/generate`: one HTTP call, its engine requests, and its reply in SGLang's format, whole or streamed.

Invariant: an engine request never outlives the call that made it; a disconnect of the client aborts it.

Who waits for whom: a call waits for its engine requests until the client disconnects; only the client has a deadline.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import anyio
import orjson
from aiohttp import web

from agentrl.errors import RequestRejected
from agentrl.servers.engine import EngineRequest, InferenceEngine, RequestProgress
from agentrl.servers.http.errors import error_event, json_reply
from agentrl.servers.http.replies import reply
from agentrl.servers.http.requests import GenerateCall, decode_generate, plan_generate

_EVENTS = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}


class Wakeup:
    """Wakes the handler of a call when one of its requests has news."""

    def __init__(self) -> None:
        self._event = anyio.Event()

    def notify(self) -> None:
        """Wake the handler."""
        self._event.set()

    async def wait(self) -> None:
        """Return at the first notification since the last wait."""
        await self._event.wait()
        self._event = anyio.Event()


class RequestSink:
    """The sink of one engine request."""

    def __init__(self, wakeup: Wakeup) -> None:
        self._wakeup = wakeup
        self.latest: RequestProgress | None = None
        self.done = False
        self.sent = -1
        """Output ids in the last streamed event; -1 before the first event."""

    def progress(self, progress: RequestProgress) -> None:
        """Take new output tokens."""
        self.latest = progress
        self._wakeup.notify()

    def finish(self, progress: RequestProgress) -> None:
        """Take the end of the request."""
        self.latest, self.done = progress, True
        self._wakeup.notify()

    def due(self, interval: int) -> bool:
        """Return whether to stream an event now: at the end, at the first tokens, or after `interval` more tokens."""
        if self.latest is None or self.sent == (end := len(self.latest.output_ids) + self.done):
            return False
        return self.done or self.sent < 0 or end - self.sent >= interval


class GenerateRoute:
    """Answers `/generate`."""

    def __init__(self, engine: InferenceEngine) -> None:
        self._engine = engine

    def add_to(self, app: web.Application) -> None:
        """Add the route to `app`; SGLang accepts PUT as well."""
        app.router.add_post("/generate", self.generate)
        app.router.add_put("/generate", self.generate)

    async def generate(self, request: web.Request) -> web.StreamResponse:
        """Answer one call; a refusal of a streamed call is an event of the stream, as in SGLang."""
        started = time.perf_counter()
        sent, params = decode_generate(await request.read())
        submitted: list[tuple[EngineRequest, RequestSink]] = []
        wakeup = Wakeup()
        try:
            try:
                call = plan_generate(sent, params, self._engine.info, self._engine.encode)
                for engine_request in call.requests:
                    sink = RequestSink(wakeup)
                    self._engine.submit(engine_request, sink)
                    submitted.append((engine_request, sink))
            except RequestRejected as error:
                if not sent.stream:
                    raise
                return web.Response(body=error_event(error), headers=_EVENTS)
            sinks = [sink for _, sink in submitted]
            if sent.stream:
                return await self._stream(request, call, sinks, wakeup, started)
            while not all(sink.done for sink in sinks):
                await wakeup.wait()
            replies = [self._reply(call, index, sink, started) for index, sink in enumerate(sinks)]
        finally:
            for engine_request, sink in submitted:
                if not sink.done:
                    self._engine.abort(engine_request.rid, exact=True)
        return json_reply(replies if call.batched else replies[0])

    async def _stream(
        self, request: web.Request, call: GenerateCall, sinks: Sequence[RequestSink], wakeup: Wakeup, started: float
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers=_EVENTS)
        await response.prepare(request)
        with suppress(ConnectionResetError):  # the client has disconnected, so there is no one to answer
            await self._send_events(response, call, sinks, wakeup, started)
        return response

    async def _send_events(
        self, response: web.StreamResponse, call: GenerateCall, sinks: Sequence[RequestSink], wakeup: Wakeup, started: float
    ) -> None:
        while not all(sink.done for sink in sinks) or any(sink.due(1) for sink in sinks):
            await wakeup.wait()
            for index, sink in enumerate(sinks):
                if not sink.due(call.stream_interval):
                    continue
                event = self._reply(call, index, sink, started, stamped=sink.sent < 0)
                if call.batched:
                    event["index"] = index
                sink.sent = len(event["output_ids"]) + sink.done
                await response.write(b"data: " + orjson.dumps(event) + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()

    def _reply(
        self, call: GenerateCall, index: int, sink: RequestSink, started: float, *, stamped: bool = True
    ) -> dict[str, Any]:
        assert sink.latest is not None
        skip = sink.latest.request.sampling.skip_special_tokens
        return reply(
            sink.latest,
            lambda ids: self._engine.decode(ids, skip_special_tokens=skip),
            logprobs=call.return_logprob[index],
            prompt_ids=call.return_prompt_ids,
            weight_version=self._engine.info.weight_version,
            seconds=time.perf_counter() - started,
            stamped=stamped,
        )
