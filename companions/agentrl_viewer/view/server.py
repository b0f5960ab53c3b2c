"""The server of the viewer: the page and its data, read only, for the reader who has the token.

Invariant: the server listens on loopback, answers GET alone, and answers nothing without the token of this start. A web
page of another site gets no answer either: it cannot send the cookie, and a host name of its own that leads here is refused.
"""

from __future__ import annotations

import hmac
import secrets
import threading
import zlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Final

import anyio
import anyio.to_thread
import msgspec
import orjson
import yaml
from aiohttp import web

from agentrl.errors import ConfigError
from agentrl.servers.listening import names_loopback
from agentrl.types import JsonValue
from agentrl_viewer.view.data import Place, RunData
from agentrl_viewer.view.document import document
from agentrl_viewer.view.episode_search import search_texts
from agentrl_viewer.view.turns import ReadersFirst
from agentrl_viewer.view.two_runs import comparison_json

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
_MAX_SEARCHES: Final = 4
"""Searches that read at a time."""
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

    def __init__(self, runs: Sequence[RunData], token: str) -> None:
        self._runs, self._token = runs, token
        self._turns = ReadersFirst()
        self._searchers = anyio.CapacityLimiter(_MAX_SEARCHES)
        """Threads of searches: one that waits for readers holds no thread that a reader needs."""
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
        app.router.add_get("/data/comparison", self._comparison)
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
                response = web.Response(
                    status=500, text=_unreadable(self._data(request), _FILES.get(request.path, "episodes"), error)
                )
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

    def _data(self, request: web.Request) -> RunData:
        """Return the run that a request names: the first where it names none."""
        asked = request.query.get("run", "0")
        if asked not in map(str, range(len(self._runs))):
            raise ValueError(f"run: expected a number below {len(self._runs)}, got {asked!r}")
        return self._runs[int(asked)]

    async def _page(self, request: web.Request) -> web.Response:
        if "token" in request.query:  # out of the address bar and the history; the browser keeps what follows a #
            response = web.Response(status=303, headers={"Location": "/"})
            if self._is_token(request.query["token"]):
                response.set_cookie(_cookie(request), self._token, httponly=True, samesite="Strict", path="/")
            return response
        headers = {"Content-Security-Policy": "frame-ancestors 'none'"}  # the document names the rest
        return web.Response(text=self._document, content_type="text/html", headers=headers)

    async def _run(self, request: web.Request) -> web.Response:
        data = self._data(request)
        return await self._json_of(lambda: data.run(others=[other.path for other in self._runs if other is not data]))

    async def _metrics(self, request: web.Request) -> web.Response:
        return await self._json_of(self._data(request).metrics, _place_asked(request))

    async def _timeline(self, request: web.Request) -> web.Response:
        return await self._json_of(self._data(request).timeline, _place_asked(request))

    async def _episodes(self, request: web.Request) -> web.Response:
        return await self._json_of(self._data(request).episodes, _place_asked(request))

    async def _episode(self, request: web.Request) -> web.Response:
        return await self._json_of(self._data(request).episode, request.match_info["id"])

    async def _staleness(self, request: web.Request) -> web.Response:
        return await self._json_of(self._data(request).staleness, _query_number(request, "step"))

    async def _comparison(self, request: web.Request) -> web.Response:
        del request
        if len(self._runs) < 2:
            raise ConfigError("the viewer shows one run; start it with two: agentrl view RUN RUN")
        return await self._json_of(comparison_json, self._runs[0].path, self._runs[1].path)

    async def _json_of(self, read: Callable[..., bytes], *arguments: object) -> web.Response:
        """Return what a thread reads from the run directory; searches wait for it."""
        with self._turns.reading():
            body = await anyio.to_thread.run_sync(read, *arguments)
        return web.Response(body=body, content_type="application/json")

    async def _search(self, request: web.Request) -> web.StreamResponse:
        text = request.query.get("text", "")
        if not 0 < len(text) <= _MAX_TEXT:
            raise ValueError(f"text: expected 1 to {_MAX_TEXT} characters, got {len(text)}")
        data, stop = self._data(request), threading.Event()
        response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson", **_HEADERS})
        await response.prepare(request)
        progress = search_texts(data.path, text, may_go_on=lambda: self._turns.wait_until_free(stop))
        try:
            while (
                line := await anyio.to_thread.run_sync(_next_answer, data, progress, limiter=self._searchers)
            ) is not None:
                await response.write(orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE))
        finally:
            stop.set()  # where the reader has gone, the thread may still be in the midst of a file
        await response.write_eof()
        return response


def _next_answer(data: RunData, progress: Iterator[dict[str, JsonValue]]) -> dict[str, JsonValue] | None:
    """Return the next answer of a search: `problem` where it fails; None: it has ended."""
    try:
        return next(progress, None)
    except ConfigError as error:
        return {"problem": str(error)}
    except _UNREADABLE as error:
        return {"problem": _unreadable(data, "episodes", error)}


def _unreadable(data: RunData, name: str, error: Exception) -> str:
    return f"cannot read {data.path / name}: {type(error).__name__}: {error}"


@asynccontextmanager
async def serving_view(*runs: RunData, port: int = 0, token: str | None = None) -> AsyncGenerator[str]:
    """Serve the page of a run, or of two, inside the block, and yield its address with the token. Needs asyncio.

    Args:
        runs: one or two.
        port: on loopback; 0 picks a free one.
        token: that the reader must have; None: a new random one.

    Cancellation: requests in flight end, and the port is closed.
    """
    token = token or secrets.token_urlsafe(24)
    routes = ViewRoutes(runs, token)
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
