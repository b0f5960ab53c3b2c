"""A loopback proxy in front of one server that keeps what the server said, apart from what a client made of it.

Invariant: bodies pass unchanged in both directions (but for the cache salt, where a test takes it out); every finished
`/generate` reply with sampled tokens is kept once. A client that leaves takes its model call with it, and no other call:
what a server has been asked to do it does, whether anybody waits for it or not.
"""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
import anyio
import orjson
from aiohttp import web
from anyio.abc import TaskGroup

from agentrl.inference.backend import GenerateRequest
from tests.support.servers import CONTROL_S

_MAX_BODY_BYTES = 64 * 2**20
_SALT = re.compile(rb',"cache_salt":"[^"]*"')
_UNFINISHED = re.compile(rb'"finish_reason":\s*null')


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """One finished completion, in the server's words."""

    rid: str
    input_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    completion_tokens: int
    logprobs: tuple[float, ...]
    spans: tuple[tuple[int, int, int], ...]
    """Start, end and version of each stretch."""
    num_retractions: int


class Tap:
    """What has passed so far; see `tapped`."""

    def __init__(self, upstream: str, *, drop_salt: bool = False) -> None:
        self._drop_salt = drop_salt
        self.url = ""
        self.served: list[Served] = []
        self.groups: list[str] = []
        """Process groups the server was asked to join."""
        self.paths: list[str] = []
        """What the client asked for, in the order in which it came here."""
        self.to_close: list[str] = []
        """Paths of calls that get no answer: each closes its connection once, as a server that took it for idle does."""
        self._passed: list[str] = []
        self._news = anyio.Event()
        self._tasks: TaskGroup | None = None
        self._upstream = upstream.rstrip("/")
        self._session: aiohttp.ClientSession | None = None

    def pieces(self, request: GenerateRequest) -> list[Served]:
        """Return the completions that began with the context of a call, in order."""
        context = tuple(request.input_ids.tolist())
        return [one for one in self.served if one.input_ids[: len(context)] == context]

    async def passed(self, path: str, times: int) -> None:
        """Wait until that many calls to `path` have been written to the server."""
        with anyio.fail_after(CONTROL_S):
            while self._passed.count(path) < times:
                await self._news.wait()

    async def _took(self, _session: aiohttp.ClientSession, _: object, sent: aiohttp.TraceRequestChunkSentParams) -> None:
        self._passed.append(sent.url.path)
        event, self._news = self._news, anyio.Event()
        event.set()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        self.paths.append(request.path)
        if request.path in self.to_close and request.transport is not None:
            self.to_close.remove(request.path)
            request.transport.close()
            return web.Response()
        if request.path == "/generate":
            return await self._forward(request)
        assert self._tasks is not None
        await request.read()
        answers: list[web.StreamResponse] = []
        answered = anyio.Event()

        async def forward() -> None:
            try:
                answers.append(await self._forward(request))
            except aiohttp.ClientError as error:
                answers.append(web.Response(status=502, text=repr(error)))
            answered.set()

        self._tasks.start_soon(forward)
        await answered.wait()
        return answers[0]

    async def _forward(self, request: web.Request) -> web.StreamResponse:
        assert self._session is not None
        body = await request.read()
        if request.path == "/init_weights_update_group":
            self.groups.append(orjson.loads(body)["group_name"])
        if self._drop_salt:
            body = _SALT.sub(b"", body)
        headers = {name: value for name, value in request.headers.items() if name in ("Content-Type", "Authorization")}
        url = self._upstream + request.path_qs
        async with self._session.request(request.method, url, data=body or None, headers=headers) as answer:
            if answer.content_type == "text/event-stream":
                return await self._stream(request, orjson.loads(body), answer)
            reply = await answer.read()
            if request.path == "/generate" and answer.status == 200:
                self._keep(orjson.loads(body), orjson.loads(reply))
            return web.Response(status=answer.status, body=reply, content_type=answer.content_type)

    async def _stream(
        self, request: web.Request, sent: dict[str, Any], answer: aiohttp.ClientResponse
    ) -> web.StreamResponse:
        response = web.StreamResponse(status=answer.status, headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        pending = b""
        async for piece in answer.content.iter_any():
            *events, pending = (pending + piece).split(b"\n\n")
            for event in events:
                if b'"meta_info"' in event and not _UNFINISHED.search(event):
                    self._keep(sent, orjson.loads(event.removeprefix(b"data:")))
            await response.write(piece)  # after it is kept: a client that has the last event closes the connection
        await response.write_eof()
        return response

    def _keep(self, sent: dict[str, Any], reply: dict[str, Any]) -> None:
        meta = reply["meta_info"]
        if not meta["completion_tokens"] or meta["finish_reason"] is None:
            return
        self.served.append(
            Served(
                rid=meta["id"],
                input_ids=tuple(sent["input_ids"]),
                output_ids=tuple(reply["output_ids"]),
                completion_tokens=meta["completion_tokens"],
                logprobs=tuple(triple[0] for triple in meta["output_token_logprobs"]),
                spans=tuple((span["start"], span["end"], int(span["version"])) for span in meta["weight_versions"]),
                num_retractions=meta.get("num_retractions", 0),
            )
        )

    def open(self, session: aiohttp.ClientSession, tasks: TaskGroup, url: str) -> None:
        """Begin to forward."""
        self._session, self._tasks, self.url = session, tasks, url

    def trace(self) -> aiohttp.TraceConfig:
        """Return what tells the tap of bodies that have been written to the server."""
        config = aiohttp.TraceConfig()
        config.on_request_chunk_sent.append(self._took)
        return config

    def app(self) -> web.Application:
        """Return the proxy."""
        app = web.Application(client_max_size=_MAX_BODY_BYTES)
        app.router.add_route("*", "/{path:.*}", self._handle)
        return app


@asynccontextmanager
async def tapped(upstream: str, *, drop_salt: bool = False) -> AsyncGenerator[Tap]:
    """Yield a tap on the server at `upstream`, listening on a free loopback port for the length of the block.

    With `drop_salt` requests reach the server without the salt that keeps them from prefixes of former weights.
    """
    tap = Tap(upstream, drop_salt=drop_salt)
    runner = web.AppRunner(tap.app(), handler_cancellation=True, access_log=None)
    async with (
        aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=4),
            timeout=aiohttp.ClientTimeout(total=None),
            trace_configs=[tap.trace()],
        ) as session,
        anyio.create_task_group() as tasks,
    ):
        await runner.setup()
        try:
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            host, port = runner.addresses[0][:2]
            tap.open(session, tasks, f"http://{host}:{port}")
            yield tap
        finally:
            await runner.cleanup()
            tasks.cancel_scope.cancel()
