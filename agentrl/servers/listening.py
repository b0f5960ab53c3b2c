"""Listening for HTTP, with deadlines for the headers of each request, and the guard before every route.

Invariant: an address off loopback is listened on only with a key. A connection that has begun a request and does not finish
its headers in time is closed; one that waits between two requests is not.

With a key no route answers without it; without one no route answers a call that a web page could have sent. Only paths under
`/v1/` are open to pages, and only to those whose origin was named (CORS). No compressed body is read, and each body arrives
in time.
"""

from __future__ import annotations

import asyncio
import errno
import hmac
import logging
import re
import socket
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import asynccontextmanager
from functools import partial
from typing import Final, NamedTuple
from urllib.parse import urlsplit

import anyio
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.typedefs import Handler, Middleware

from agentrl.errors import ConfigError
from agentrl.processes.machine import is_loopback

HEADERS_S: Final = 10.0
"""Seconds that a client has to send the headers of a request."""
_SHUTDOWN_S: Final = 1.0
_KEEPALIVE_S: Final = 300.0
_END_OF_HEAD: Final = b"\r\n\r\n"
_END_OF_CHUNKS: Final = b"0\r\n\r\n"
BODY_S: Final = 30.0
"""Seconds that a client has to send the body of a request."""
_OPEN: Final = "/v1/"
_ORIGIN: Final = re.compile(r"https?://[a-z0-9.-]+(:\d{1,5})?|https?://\[[0-9a-f:]+\](:\d{1,5})?")


def names_loopback(host: str) -> bool:
    """Return whether a `Host` header, such as `127.0.0.1:30000`, names this machine's loopback.

    Example:
        >>> names_loopback("localhost:8000"), names_loopback("[::1]:8000"), names_loopback("rebound.example:8000")
        (True, True, False)
    """
    try:
        return is_loopback(urlsplit(f"//{host}").hostname or "")
    except ValueError:
        return False


def check_address(host: str, api_key: str | None) -> None:
    """Refuse to listen without a key on an address that other machines can reach.

    Example:
        >>> check_address("127.0.0.1", None)
        >>> check_address("0.0.0.0", None)
        Traceback (most recent call last):
        ...
        agentrl.errors.ConfigError: host '0.0.0.0' can be reached from other machines: ...
    """
    if api_key == "":
        raise ConfigError("the API key is empty: set one, or drop it and listen on 127.0.0.1")
    if api_key is None and not is_loopback(host):
        raise ConfigError(f"host {host!r} can be reached from other machines: set an API key, or listen on 127.0.0.1")


def check_listening(host: str, port: int) -> None:
    """Raise `ConfigError` where an address cannot be listened on now, such as one that another program holds."""
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        absent = [error for family, _, _, _, address in addresses if (error := _absence(family, address)) is not None]
        if len(absent) == len(addresses):  # a name may have addresses of a kind that this machine lacks
            raise absent[0]
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror or error}") from error


def _absence(family: int, address: tuple[object, ...]) -> OSError | None:
    """Return why this machine lacks an address; one that is there and cannot be listened on is raised."""
    try:
        with socket.socket(family, socket.SOCK_STREAM) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen()
    except OSError as error:
        if error.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
            return error
        raise
    return None


class Connections:
    """The connections of one server, each closed when the headers of a request take too long."""

    def __init__(self, headers_s: float = HEADERS_S) -> None:
        self._headers_s = headers_s
        self._open: dict[asyncio.BaseProtocol, _Connection] = {}

    def accept(self, server: web.Server) -> asyncio.Protocol:
        """Return the protocol of a new connection to `server`."""
        handler = server()
        connection = self._open[handler] = _Connection(handler, self._headers_s, partial(self._open.pop, handler, None))
        return connection

    def headers_came(self, handler: asyncio.BaseProtocol, body_size: int | None) -> None:
        """Take note that the headers of a request on this connection are complete; its body follows, None: in chunks."""
        if handler in self._open:
            self._open[handler].headers_came(body_size)

    def answered(self, handler: asyncio.BaseProtocol) -> None:
        """Take note that the request has its response, so that the next one is read."""
        if handler in self._open:
            self._open[handler].answered()

    async def close(self) -> None:
        """Abort the connections that are left when the listener is closed, and wait until each is lost."""
        while self._open:
            for connection in [*self._open.values()]:
                connection.abort()
            await anyio.lowlevel.checkpoint()


class _Connection(asyncio.Protocol):
    """Hands a connection on to aiohttp's handler, and closes it when headers are late.

    What arrives beyond the end of a request belongs to the next one, whose headers have begun. From then on the deadline
    runs after every answer on this connection, since what else the parser holds is unknown.
    """

    def __init__(self, handler: web.RequestHandler, headers_s: float, on_lost: partial[object]) -> None:
        self._handler, self._headers_s, self._on_lost = handler, headers_s, on_lost
        self._transport: asyncio.BaseTransport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._in_request = self._is_pipelined = False
        self._body_size: int | None = None
        self._expect_request()

    def abort(self) -> None:
        """Drop the connection with what its client has not read; one that is not made yet stays."""
        if isinstance(self._transport, asyncio.WriteTransport):
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._await_headers()  # of the first request, which has not begun yet
        self._handler.connection_made(transport)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._stop_timer()
        self._on_lost()
        self._handler.connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if not self._in_request:
            self._await_headers()
        if not self._head_size:
            joined = self._last + data
            end_of_head = joined.find(_END_OF_HEAD)
            if end_of_head >= 0:
                self._head_size = self._arrived - len(self._last) + end_of_head + len(_END_OF_HEAD)
        self._arrived += len(data)
        self._last = (self._last + data[-len(_END_OF_CHUNKS) :])[-len(_END_OF_CHUNKS) :]
        self._handler.data_received(data)

    def eof_received(self) -> None:
        self._handler.eof_received()

    def pause_writing(self) -> None:
        self._handler.pause_writing()

    def resume_writing(self) -> None:
        self._handler.resume_writing()

    def headers_came(self, body_size: int | None) -> None:
        self._stop_timer()
        self._in_request, self._body_size = True, body_size

    def answered(self) -> None:
        self._in_request = False
        if self._body_size is None:
            self._is_pipelined |= self._last != _END_OF_CHUNKS
        else:
            self._is_pipelined |= not self._head_size or self._arrived > self._head_size + self._body_size
        self._expect_request()
        if self._is_pipelined:
            self._await_headers()

    def _expect_request(self) -> None:
        """Count the bytes of the next request from here on."""
        self._arrived = self._head_size = 0
        self._last = b""

    def _await_headers(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._headers_s, self._handler.force_close)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _logger_without_contents() -> logging.Logger:
    """Return the logger of the server: of a request that is no HTTP it tells the kind, since its headers may hold a key."""
    logger = logging.getLogger("agentrl.servers.http")
    if not logger.filters:
        logger.addFilter(_without_contents)
    return logger


def _without_contents(record: logging.LogRecord) -> bool:
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, HttpProcessingError):
        record.exc_info, record.msg = None, f"{record.msg}: {type(error).__name__}"
    return True


@asynccontextmanager
async def listening(
    app: web.Application, connections: Connections, *, host: str, port: int, api_key: str | None
) -> AsyncGenerator[str]:
    """Serve `app` inside the block and yield the base URL. Needs the asyncio event loop.

    Cancellation: handlers are cancelled, and the port is closed.
    """
    check_address(host, api_key)
    runner = web.AppRunner(
        app,
        handler_cancellation=True,
        access_log=None,
        shutdown_timeout=_SHUTDOWN_S,
        keepalive_timeout=_KEEPALIVE_S,
        lingering_time=_SHUTDOWN_S,
        auto_decompress=False,  # the guard refuses what is compressed, before anything grows
        logger=_logger_without_contents(),
    )
    await runner.setup()
    assert runner.server is not None
    listener: asyncio.Server | None = None
    try:
        try:
            accept = partial(connections.accept, runner.server)
            listener = await asyncio.get_running_loop().create_server(accept, host, port, backlog=1024)
        except OSError as error:
            raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror or error}") from error
        bound = listener.sockets[0].getsockname()
        yield f"http://[{bound[0]}]:{bound[1]}" if ":" in str(bound[0]) else f"http://{bound[0]}:{bound[1]}"
    finally:
        with anyio.CancelScope(shield=True):
            if listener is not None:
                await _close_listener(listener)
            await runner.cleanup()  # waits at most _SHUTDOWN_S for handlers
            await connections.close()


async def _close_listener(listener: asyncio.Server) -> None:
    """Accept no more connections, and close the port once those that were accepted are made.

    asyncio leaks a connection whose server closes between the two: its transport asserts that the server is open.
    """
    for each in listener.sockets:
        asyncio.get_running_loop().remove_reader(each.fileno())
    await anyio.lowlevel.checkpoint()
    listener.close()


class AllowedOrigins:
    """The origins of pages that may call a server."""

    def __init__(self, names: Iterable[str] = ()) -> None:
        self._names = frozenset(names)
        for name in self._names:
            if _ORIGIN.fullmatch(name) is None:
                raise ConfigError(f"--allow-origin: expected an origin such as http://localhost:3000, got {name!r}")

    def admit(self, request: web.Request) -> bool:
        """Return whether a page of a named origin sent the request, to a path that is open to it."""
        return request.path.startswith(_OPEN) and request.headers.get("Origin") in self._names

    def preflight(self, request: web.Request) -> web.Response | None:
        """Return the answer to a browser that asks whether a page may call; None for any other request."""
        if request.method != "OPTIONS" or not self.admit(request):
            return None
        allowed = {"Access-Control-Allow-Methods": "GET, POST", "Access-Control-Max-Age": "600"}
        headers = request.headers.get("Access-Control-Request-Headers", "authorization, content-type")
        return web.Response(status=204, headers={**allowed, "Access-Control-Allow-Headers": headers})

    async def mark(self, request: web.Request, response: web.StreamResponse) -> None:
        """Tell the browser that the page may read the response."""
        if self.admit(request):
            response.headers["Access-Control-Allow-Origin"] = request.headers["Origin"]
            response.headers["Vary"] = "Origin"


class Refusal(NamedTuple):
    """The reason why no route gets to see a request."""

    status: int
    reason: str


def guard(
    api_key: str | Callable[[str], bool] | None,
    connections: Connections,
    turn_away: Callable[[web.Request, Refusal], web.Response],
    *,
    body_s: float = BODY_S,
    origins: AllowedOrigins | None = None,
) -> Middleware:
    """Return the middleware that lets a request pass, with its whole body, or turns it away.

    Args:
        api_key: every request must send it, as `Authorization: Bearer <key>` or `x-api-key: <key>`; None: none must. With
            several keys, what says whether a request sent one of them.
        connections: of the server, which learn of each request.
        turn_away: makes the response to a refused request.
        body_s: seconds that a client has to send the body of a request.
        origins: of web pages that may call; None: no page may.
    """
    pages = origins or AllowedOrigins()
    accepts = partial(_is_key, api_key) if isinstance(api_key, str) else api_key

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        is_chunked = "Transfer-Encoding" in request.headers
        connections.headers_came(request.protocol, None if is_chunked else request.content_length or 0)
        try:
            if (answer := pages.preflight(request)) is not None:
                return answer
            refusal = _unwanted(request, accepts, pages)
            if refusal is None and not await _body_came(request, body_s):
                refusal = Refusal(408, f"the body was not complete after {body_s:g} s")
            if refusal is not None:
                reply = turn_away(request, refusal)
                if refusal.status in (408, 415):
                    reply.force_close()  # what is left of the body is not read
                return reply
            return await handler(request)
        finally:
            connections.answered(request.protocol)

    return check


def sent_key(request: web.Request) -> str:
    """Return the API key of a request, as either kind of client sends it; empty without one."""
    scheme, _, key = request.headers.get("Authorization", "").strip().partition(" ")
    if scheme.lower() == "bearer" and key.strip():  # schemes ignore case (RFC 9110, 11.1)
        return key.strip()
    return request.headers.get("x-api-key", "")


def _is_key(expected: str, sent: str) -> bool:
    return hmac.compare_digest(sent.encode("utf-8", "surrogateescape"), expected.encode())


def _unwanted(request: web.Request, accepts: Callable[[str], bool] | None, pages: AllowedOrigins) -> Refusal | None:
    if accepts is not None:
        if not accepts(sent_key(request)):
            return Refusal(401, "this server requires a key: send Authorization: Bearer <key>, or x-api-key: <key>")
    elif (why := _foreign(request, pages)) is not None:
        return Refusal(403, f"{why}; a server without a key answers programs of this machine only")
    encoding = request.headers.get("Content-Encoding", "identity")
    if encoding != "identity":
        return Refusal(415, f"Content-Encoding {encoding!r} is not read here: send the body as it is")
    return None


async def _body_came(request: web.Request, seconds: float) -> bool:
    """Return whether the whole body has come in time; the request keeps it for its handler."""
    with anyio.move_on_after(seconds) as wait:
        await request.read()
    return not wait.cancelled_caught


def _foreign(request: web.Request, pages: AllowedOrigins) -> str | None:
    """Return what shows that a web page sent the request, which needs no key; None for a program's own.

    A page can send requests to this machine, but it cannot hide its origin or its site, name another host than its own in
    `Host`, or send JSON without the server's consent.
    """
    host = request.headers.get("Host", "")
    if not names_loopback(host):
        return f"Host {host!r} is not this machine"
    if not pages.admit(request):
        origin, site = request.headers.get("Origin"), request.headers.get("Sec-Fetch-Site")
        if origin is not None and origin != f"http://{host}":
            return f"Origin {origin!r} is another site"
        if site is not None and site not in ("none", "same-origin"):  # of a GET without an origin, as for an image
            return f"Sec-Fetch-Site {site!r} is another site"
    if request.can_read_body and request.content_type != "application/json":
        return f"Content-Type {request.content_type!r} is not application/json"
    return None
