"""A loopback proxy in front of one server that keeps what the server said, apart from what a client made of it.

Invariant: bodies pass unchanged in both directions (but for the cache salt, where a test takes it out); every finished
`/generate` reply with sampled tokens is kept once.
"""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
import orjson
from aiohttp import web

_MAX_BODY_BYTES = 64 * 2**20
_SALT = re.compile(rb',"cache_salt":"[^"]*"')
_UNFINISHED = re.compile(rb'"finish_reason":\s*null')


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """One finished completion, in the server's words."""

    rid: str
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
        self._upstream = upstream.rstrip("/")
        self._session: aiohttp.ClientSession | None = None

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
                return await self._stream(request, answer)
            reply = await answer.read()
            if request.path == "/generate" and answer.status == 200:
                self._keep(orjson.loads(reply))
            return web.Response(status=answer.status, body=reply, content_type=answer.content_type)

    async def _stream(self, request: web.Request, answer: aiohttp.ClientResponse) -> web.StreamResponse:
        response = web.StreamResponse(status=answer.status, headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        pending = b""
        async for piece in answer.content.iter_any():
            *events, pending = (pending + piece).split(b"\n\n")
            for event in events:
                if b'"meta_info"' in event and not _UNFINISHED.search(event):
                    self._keep(orjson.loads(event.removeprefix(b"data:")))
            await response.write(piece)  # after it is kept: a client that has the last event closes the connection
        await response.write_eof()
        return response

    def _keep(self, reply: dict[str, Any]) -> None:
        meta = reply["meta_info"]
        if not meta["completion_tokens"] or meta["finish_reason"] is None:
            return
        self.served.append(
            Served(
                rid=meta["id"],
                output_ids=tuple(reply["output_ids"]),
                completion_tokens=meta["completion_tokens"],
                logprobs=tuple(triple[0] for triple in meta["output_token_logprobs"]),
                spans=tuple((span["start"], span["end"], int(span["version"])) for span in meta["weight_versions"]),
                num_retractions=meta.get("num_retractions", 0),
            )
        )

    def open(self, session: aiohttp.ClientSession, url: str) -> None:
        """Begin to forward."""
        self._session, self.url = session, url

    def app(self) -> web.Application:
        """Return the proxy."""
        app = web.Application(client_max_size=_MAX_BODY_BYTES)
        app.router.add_route("*", "/{path:.*}", self._forward)
        return app


@asynccontextmanager
async def tapped(upstream: str, *, drop_salt: bool = False) -> AsyncGenerator[Tap]:
    """Yield a tap on the server at `upstream`, listening on a free loopback port for the length of the block.

    With `drop_salt` requests reach the server without the salt that keeps them from prefixes of former weights.
    """
    tap = Tap(upstream, drop_salt=drop_salt)
    runner = web.AppRunner(tap.app(), handler_cancellation=True, access_log=None)
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=4), timeout=aiohttp.ClientTimeout(total=None)
    ) as session:
        await runner.setup()
        try:
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            host, port = runner.addresses[0][:2]
            tap.open(session, f"http://{host}:{port}")
            yield tap
        finally:
            await runner.cleanup()
