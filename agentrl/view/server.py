"""The server of the viewer: the page and its data, read only, for the reader who has the token.

Invariant: the server listens on loopback, answers GET alone, and answers nothing without the token of this start. A web
page of another site gets no answer either: it cannot send the cookie, and a host name of its own that leads here is refused.
"""

from __future__ import annotations

import hmac
import secrets
import zlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from contextlib import asynccontextmanager
from typing import Final

import anyio
import anyio.to_thread
import msgspec
import orjson
import yaml
from aiohttp import web

from agentrl.errors import ConfigError
from agentrl.servers.loopback import names_loopback
from agentrl.types import JsonValue
from agentrl.view.data import Place, RunData
from agentrl.view.document import document
from agentrl.view.search import search_texts

_HOST: Final = "127.0.0.1"
_SHUTDOWN_S: Final = 1.0
_HEADERS: Final = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}
_MAX_TEXT: Final = 500
"""Characters of a text to search for."""
_FILES: Final = {
    "/data/run": "config.yaml",
    "/data/metrics": "metrics.jsonl",
    "/data/timeline": "timeline.jsonl",
    "/data/episodes": "episodes/index.jsonl",
}
"""The file that a request reads; the other requests read several of `episodes/`."""
_UNREADABLE: Final = (msgspec.DecodeError, orjson.JSONDecodeError, OSError, EOFError, zlib.error, yaml.YAMLError)
"""What reading a damaged file raises."""
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class ViewRoutes:
    """Answers the requests of the page."""

    def __init__(self, data: RunData, token: str) -> None:
        """Answer from `data` to those who have `token`."""
        self._data, self._token = data, token
        self._document = document()

    def application(self) -> web.Application:
        """Return the routes."""
        app = web.Application(middlewares=[self._guard])
        app.router.add_get("/", self._page)
        app.router.add_get("/data/run", self._run)
        app.router.add_get("/data/metrics", self._metrics)
        app.router.add_get("/data/timeline", self._timeline)
        app.router.add_get("/data/episodes", self._episodes)
        app.router.add_get("/data/episode/{id}", self._episode)
        app.router.add_get("/data/staleness", self._staleness)
        app.router.add_get("/data/search", self._search)
        return app

    @web.middleware
    async def _guard(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        response = self._refused(request)
        if response is None:
            try:
                response = await handler(request)
            except web.HTTPException as error:
                response = web.Response(status=error.status, text=error.reason)
            except ConfigError as error:  # what was asked for is not in the run, or not readable
                response = web.Response(status=404, text=str(error))
            except ConnectionError:  # the reader has gone
                raise
            except _UNREADABLE as error:
                response = web.Response(status=500, text=self._unreadable(_FILES.get(request.path, "episodes"), error))
            except ValueError as error:
                response = web.Response(status=400, text=str(error))
        if not response.prepared:
            response.headers.update(_HEADERS)
        return response

    def _refused(self, request: web.Request) -> web.Response | None:
        """Return the answer to a request that is not the reader's; None for one that is."""
        host = request.headers.get("Host", "")
        if not names_loopback(host):
            return web.Response(status=403, text=f"Host {host!r} is not this machine; open the address that agentrl printed")
        if request.method not in ("GET", "HEAD"):
            return web.Response(status=405, text="the viewer only reads", headers={"Allow": "GET, HEAD"})
        if self._is_token(request.cookies.get(_cookie(request), "")):
            return None
        if request.path == "/" and self._is_token(request.query.get("token", "")):
            return None
        return web.Response(status=403, text="the token is missing or wrong; open the address that agentrl printed")

    def _is_token(self, given: str) -> bool:
        # A cookie may hold bytes that are not UTF-8, which aiohttp passes on as lone surrogates.
        return hmac.compare_digest(given.encode(errors="surrogatepass"), self._token.encode())

    def _unreadable(self, name: str, error: Exception) -> str:
        return f"cannot read {self._data.path / name}: {type(error).__name__}: {error}"

    async def _page(self, request: web.Request) -> web.Response:
        if "token" in request.query:  # out of the address bar and the history; the browser keeps what follows a #
            response = web.Response(status=303, headers={"Location": "/"})
            if self._is_token(request.query["token"]):
                response.set_cookie(_cookie(request), self._token, httponly=True, samesite="Strict", path="/")
            return response
        headers = {"Content-Security-Policy": "frame-ancestors 'none'"}  # the document names the rest
        return web.Response(text=self._document, content_type="text/html", headers=headers)

    async def _run(self, request: web.Request) -> web.Response:
        del request
        return await _json_of(self._data.run)

    async def _metrics(self, request: web.Request) -> web.Response:
        return await _json_of(self._data.metrics, _place_asked(request))

    async def _timeline(self, request: web.Request) -> web.Response:
        return await _json_of(self._data.timeline, _place_asked(request))

    async def _episodes(self, request: web.Request) -> web.Response:
        return await _json_of(self._data.episodes, _place_asked(request))

    async def _episode(self, request: web.Request) -> web.Response:
        return await _json_of(self._data.episode, request.match_info["id"])

    async def _staleness(self, request: web.Request) -> web.Response:
        return await _json_of(self._data.staleness, _query_number(request, "step"))

    async def _search(self, request: web.Request) -> web.StreamResponse:
        text = request.query.get("text", "")
        if not 0 < len(text) <= _MAX_TEXT:
            raise ValueError(f"text: expected 1 to {_MAX_TEXT} characters, got {len(text)}")
        response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson", **_HEADERS})
        await response.prepare(request)
        progress = search_texts(self._data.path, text)
        try:
            while (line := await anyio.to_thread.run_sync(self._next_answer, progress)) is not None:
                await response.write(orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE))
        finally:
            progress.close()
        await response.write_eof()
        return response

    def _next_answer(self, progress: Generator[dict[str, JsonValue]]) -> dict[str, JsonValue] | None:
        """Return the next answer of a search: `problem` where it fails; None: it has ended."""
        try:
            return next(progress, None)
        except ConfigError as error:
            return {"problem": str(error)}
        except _UNREADABLE as error:
            return {"problem": self._unreadable("episodes", error)}


@asynccontextmanager
async def serving_view(data: RunData, *, port: int = 0, token: str | None = None) -> AsyncGenerator[str]:
    """Serve the page of a run inside the block, and yield its address with the token. Needs the asyncio event loop.

    Args:
        data: of the run.
        port: on loopback; 0 picks a free one.
        token: that the reader must have; None: a new random one.

    Raises:
        ConfigError: the port cannot be used.

    Cancellation: requests in flight end, and the port is closed.
    """
    token = token or secrets.token_urlsafe(24)
    routes = ViewRoutes(data, token)
    runner = web.AppRunner(routes.application(), handler_cancellation=True, access_log=None, shutdown_timeout=_SHUTDOWN_S)
    await runner.setup()
    try:
        try:
            await web.TCPSite(runner, _HOST, port).start()
        except OSError as error:
            raise ConfigError(f"cannot listen on {_HOST}:{port}: {error.strerror or error}; leave --port out") from error
        yield f"http://{_HOST}:{runner.addresses[0][1]}/?token={token}"
    finally:
        with anyio.CancelScope(shield=True):  # waits at most _SHUTDOWN_S for handlers
            await runner.cleanup()


def _cookie(request: web.Request) -> str:
    """Return the name of the cookie: browsers share cookies between the ports of a host, and each viewer has its own."""
    _, _, port = request.host.rpartition(":")
    return f"agentrl_view_{port}"


def _place_asked(request: web.Request) -> Place:
    return Place.parse(request.query.get("from", ""))


def _query_number(request: web.Request, name: str) -> int:
    given = request.query.get(name, "")
    if not given.isdecimal():
        raise ValueError(f"{name}: expected a whole number from 0, got {given!r}")
    return int(given)


async def _json_of(read: Callable[..., bytes], *arguments: int | str | Place) -> web.Response:
    """Return what a worker thread reads from the run directory."""
    body = await anyio.to_thread.run_sync(read, *arguments)
    return web.Response(body=body, content_type="application/json")
