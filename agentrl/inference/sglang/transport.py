"""HTTP to one server: bytes out, bytes in, every failure one of agentrl's named errors.

Invariant: no aiohttp exception leaves this module. A cancelled call closes its connection, which makes a server drop a
request that it holds during a pause. A model call brings its own deadline; a control call gets that of `Control`.
"""

from __future__ import annotations

import errno
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from http import HTTPStatus
from typing import NoReturn, cast

import aiohttp
import msgspec
import orjson
from yarl import URL

from agentrl.errors import ReplyError, RequestRejected, ServerError, ServerUnavailable, WeightSyncError
from agentrl.inference.sglang.wire import ControlOutcome, decode
from agentrl.support.concurrency import Deadline
from agentrl.support.foreign import one_line

MAX_REPLY_BYTES = 64 * 2**20
"""Longest reply to a control call that is read."""
_EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
"""Errors of this machine, for which no server is to blame."""


class Transport:
    """A connection pool to one server; open from the first call until `aclose`."""

    def __init__(self, url: str, *, api_key: str | None = None) -> None:
        self.url = url.rstrip("/")
        self._headers = {"Content-Type": "application/json"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._urls: dict[str, URL] = {}
        self._session: aiohttp.ClientSession | None = None

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            # Requests in flight are the unit of concurrency: the pool of connections sets no limit of its own. SGLang's
            # server closes idle connections after 5 s; closing them first avoids writing to one that is being closed. On
            # a busy machine 4 s were not early enough.
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=2),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=None),
                cookie_jar=aiohttp.DummyCookieJar(),
                headers=self._headers,
                auto_decompress=False,
            )
        return self._session

    def _url(self, path: str) -> URL:
        url = self._urls.get(path)
        if url is None:
            url = self._urls[path] = URL(self.url + path)
        return url

    async def call(self, method: str, path: str, body: bytes | None = None, *, max_bytes: int = MAX_REPLY_BYTES) -> bytes:
        """Return the body of the reply, of at most `max_bytes`.

        Raises:
            ServerUnavailable: the server refused, reset or closed the connection before the reply was complete, or
                answered with HTTP 5xx or 429.
            RequestRejected: any other HTTP 4xx, with the server's message.
            ReplyError: a redirect, a reply that is not HTTP, or one that is too long.
            ServerError: this process cannot open a connection, for lack of file descriptors or memory.
        """
        try:
            async with self._open().request(method, self._url(path), data=body, allow_redirects=False) as response:
                reply = await self._read(path, response, max_bytes)
        except ServerError:
            raise
        except (aiohttp.ClientError, OSError) as error:
            raise self.unreachable(path, error) from error
        if response.status != 200:
            raise self._failure(path, response, reply)
        return reply

    async def _read(self, path: str, response: aiohttp.ClientResponse, max_bytes: int) -> bytes:
        pieces: list[bytes] = []
        size = 0
        async for piece in response.content.iter_any():
            size += len(piece)
            if size > max_bytes:
                response.close()
                raise self.too_long(path, max_bytes)
            pieces.append(piece)
        return b"".join(pieces)

    def too_long(self, path: str, max_bytes: int) -> ReplyError:
        """Return the error of a reply with more than `max_bytes`."""
        return ReplyError(
            f"{self.url}{path}: the reply has more than {max_bytes} bytes, which no reply to this call needs; the rest was "
            "not read",
            url=self.url,
        )

    @asynccontextmanager
    async def events(self, path: str, body: bytes, *, max_bytes: int) -> AsyncGenerator[AsyncIterator[bytes], None]:
        """Yield the payloads of a server-sent event stream, each of at most `max_bytes`."""
        try:
            response = await self._open().request("POST", self._url(path), data=body, allow_redirects=False)
            refusal = None if response.status == 200 else await self._read(path, response, max_bytes)
        except ServerError:
            raise
        except (aiohttp.ClientError, OSError) as error:
            raise self.unreachable(path, error) from error
        try:
            if refusal is not None:
                raise self._failure(path, response, refusal)
            yield _Payloads(self, path, response, max_bytes)
        finally:
            response.close()

    async def aclose(self) -> None:
        """Close all connections; a cancellation does not prevent that."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    def unreachable(self, path: str, error: Exception) -> ServerError:
        """Return agentrl's error for one of aiohttp or of the machine."""
        if isinstance(error, (aiohttp.ClientResponseError, aiohttp.InvalidURL)):
            return ReplyError(f"{self.url}{path}: the reply is not HTTP: {error!r}", url=self.url)
        if isinstance(error, OSError) and error.errno in _EXHAUSTED:
            return ServerError(
                f"this process cannot open a connection to {self.url}: {error.strerror}; the server is not to blame. Raise "
                "the limit (`ulimit -n`), lower rollout.max_concurrent_episodes, or close what the workflow leaves open"
            )
        refused = isinstance(error, aiohttp.ClientConnectorError)
        what = "refused the connection" if refused else "closed the connection before it answered"
        return ServerUnavailable(f"{self.url}{path}: the server {what} ({type(error).__name__}: {error})", url=self.url)

    def _failure(self, path: str, response: aiohttp.ClientResponse, body: bytes) -> ServerError:
        status = response.status
        message = f"{self.url}{path}: HTTP {status}: {error_message(body)}"
        if status in (401, 403):
            message += "; the server wants a key: name its environment variable in inference.api_key_env"
        if status == HTTPStatus.NOT_FOUND:
            message += (
                f"; this server has no {path}, which SGLang and agentrl's servers have: name the base URL of one in "
                "inference.urls, such as http://127.0.0.1:30000, without /v1"
            )
        if 400 <= status < 500 and status != HTTPStatus.TOO_MANY_REQUESTS:
            return RequestRejected(message, status=status, url=self.url)
        if status < 400:
            return ReplyError(message, status=status, url=self.url)
        failure = ServerUnavailable(message, status=status, url=self.url)
        failure.retry_after_s = _retry_after_s(response.headers.get("Retry-After", ""))
        return failure


class _Payloads(AsyncIterator[bytes]):
    """The payloads of a server-sent event stream; a cancelled `anext` loses none."""

    def __init__(self, transport: Transport, path: str, response: aiohttp.ClientResponse, max_bytes: int) -> None:
        self._transport, self._path, self._response, self._max_bytes = transport, path, response, max_bytes
        self._ready: deque[bytes] = deque()
        self._pending = b""

    async def __anext__(self) -> bytes:
        while not self._ready:
            self._split(await self._read())
        payload = self._ready[0]
        if payload == b"[DONE]":
            raise StopAsyncIteration
        return self._ready.popleft()

    async def _read(self) -> bytes:
        try:
            piece = await self._response.content.readany()
        except (aiohttp.ClientError, OSError) as error:
            raise self._transport.unreachable(self._path, error) from error
        if not piece:
            self._raise_ended()
        return piece

    def _split(self, piece: bytes) -> None:
        *complete, self._pending = (self._pending + piece).replace(b"\r\n", b"\n").split(b"\n\n")
        self._ready += [payload for event in complete if (payload := event.removeprefix(b"data:").strip())]
        if not self._ready and len(self._pending) > self._max_bytes:
            raise self._transport.too_long(self._path, self._max_bytes)

    def _raise_ended(self) -> NoReturn:
        url = self._transport.url
        raise ServerUnavailable(
            f"{url}{self._path}: the stream ended before its end mark; the server died mid-request", url=url
        )


class Control:
    """Control calls to one server: each has a deadline and a message that names who waited for what.

    A change of weights is sent only when the server has finished the one before: two at once during a pause end SGLang.
    """

    def __init__(self, transport: Transport, *, timeout_s: float) -> None:
        self._transport = transport
        self.url = transport.url
        self.timeout_s = timeout_s
        self._unanswered = False
        """Whether a call about weights was given up before its answer came, so the server may still be working on it."""

    async def call(self, method: str, path: str, body: bytes | None, what: str) -> bytes:
        """Return the body of the reply; `what` names the awaited thing in the message of the deadline.

        Cancellation: closes the connection; the server may still do the work.
        """
        with Deadline(self.timeout_s, lambda: f"{self.url}{path}: agentrl waited for {what}", self.url):
            return await self._transport.call(method, path, body)

    async def weights(self, path: str, body: object, what: str) -> None:
        """POST a call about weights, after the end of one that was given up; a refusal is a `WeightSyncError`."""
        if self._unanswered:
            await self._let_it_finish()
        self._unanswered = True
        try:
            reply = await self.call("POST", path, orjson.dumps(body), f"the server to {what}")
            outcome = decode(reply, ControlOutcome, path, self.url)
        except RequestRejected as error:
            outcome = ControlOutcome(success=False, message=str(error))
        self._unanswered = False
        if not outcome.success:
            raise WeightSyncError(f"{self.url}: the server did not {what}: {outcome.message or outcome.error_message}")

    async def _let_it_finish(self) -> None:
        # SGLang's workers take calls in the order of their arrival, and these two calls ask the workers. The first may
        # overtake a call that the server has not read from its connection yet; once it is answered, that call has reached
        # the workers, before the second.
        for _ in range(2):
            await self.call("GET", "/server_info", None, "the server to finish a change of weights that was given up")


def _retry_after_s(header: str) -> float | None:
    """Return the seconds that a `Retry-After` header asks for, as a number or as a date; None where it has neither."""
    if header.isdecimal():
        return float(header)
    try:
        date = parsedate_to_datetime(header)
    except ValueError:
        return None
    return max(0.0, (date.replace(tzinfo=date.tzinfo or UTC) - datetime.now(UTC)).total_seconds())


def error_message(body: bytes) -> str:
    """Return the message inside an error reply, in any of SGLang's forms, or else the head of the body.

    Example:
        >>> error_message(b'{"error": {"message": "too long"}}'), error_message(b'{"success": false, "message": "no"}')
        ('too long', 'no')
    """
    try:
        value = msgspec.json.decode(body)
        for name in ("error", "error_message", "message", "detail"):
            if isinstance(value, dict) and name in value:
                value = cast("dict[str, object]", value)[name]
        return one_line(str(value)[:1000])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return one_line(body[:300].decode(errors="replace")) or "no message"
