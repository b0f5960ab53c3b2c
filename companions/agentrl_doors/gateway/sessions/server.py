"""The server of the doors of a process: it finds the session of each request, and writes the answers.

Invariant: a request reaches a session only with a secret of it, which is compared in constant time; one secret samples, the
other one rewards, and neither does both. The secrets of an episode that has ended open nothing. No secret and no content of
a call is in a message or a log. One server runs while a door is open, on loopback; it ends with the last door.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Final, NamedTuple

import anyio
from aiohttp import web
from aiohttp.typedefs import Handler
from anyio.lowlevel import RunVar

from agentrl.client import Client, Door, DoorSettings
from agentrl.client.backend import Answer, Piece
from agentrl.errors import WorkflowError
from agentrl.servers.http.errors import json_reply
from agentrl.servers.listening import Connections, Refusal, guard, listening, sent_key
from agentrl.support.concurrency import task_group
from agentrl_doors.gateway.dialect import Dialect, DialectCall
from agentrl_doors.gateway.dialects import CHAT_ROUTE, COUNT_ROUTE, DIALECTS, dialect_of
from agentrl_doors.gateway.event_stream import KEEP_ALIVE_S, frames_of, send_events
from agentrl_doors.gateway.refusals import CallRefused, refusal_reply
from agentrl_doors.gateway.sessions.endpoint_routes import ENDPOINT_ROUTES
from agentrl_doors.gateway.sessions.session import Requester, Session
from agentrl_doors.gateway.sessions.side_calls import other_answers

_MAX_BODY_BYTES: Final = 32 * 2**20
_SECRET_BYTES: Final = 32
_WRONG_KEY: Final = "invalid_api_key"
_REMEMBERED: Final = 4096
"""Secrets of ended episodes that get a reason of their own."""
_SAMPLE_HEADER: Final = "x-agentrl-sample"
_RETRY_HEADER: Final = "x-stainless-retry-count"
_MODEL: Final = "policy"
"""The name of the model in lists; a call may name any."""
_MAX_NAME: Final = 200
_SPEAKER_MARKS: Final = ("role", "player", "agent")


class Place(NamedTuple):
    """The parts of a request's path."""

    secret: str | None
    """None: the request has none in its path, and is to have it as its API key. Of an online run it is the name of the
    conversation."""
    route: str
    """The route of the API, such as `chat/completions`; `reward`; or empty."""
    marks: Mapping[str, str]
    """The role, the player and the agent that the path names."""


class _Secret(NamedTuple):
    """What a secret opens."""

    text: bytes
    session: Session | None
    rewards: bool
    """Whether it sets rewards; else it samples."""


class DoorServer:
    """The sessions of one process, and its routes."""

    def __init__(self) -> None:
        self._secrets: dict[bytes, _Secret] = {}
        self._ended: dict[bytes, None] = {}

    def app(self, connections: Connections) -> web.Application:
        """Return the application that answers for all sessions."""
        return app_of(self._answer, None, connections)

    @contextmanager
    def admitted(self, session: Session, url: str) -> Generator[Door]:
        """Yield the door of a session, whose secrets open it inside the block."""
        kinds = (False, True) if session.takes_rewards else (False,)
        secret_of = {rewards: secrets.token_urlsafe(_SECRET_BYTES) for rewards in kinds}
        opened = {_digest(each): _Secret(each.encode(), session, kind) for kind, each in secret_of.items()}
        self._secrets |= opened
        try:
            yield Door(server_url=url, key=secret_of[False], reward_key=secret_of.get(True))
        finally:
            for digest in opened:
                del self._secrets[digest]
                if len(self._ended) >= _REMEMBERED:
                    del self._ended[next(iter(self._ended))]
                self._ended[digest] = None

    def _session(self, secret: str, *, is_reward: bool) -> Session:
        digest = _digest(secret)
        known = self._secrets.get(digest, _Secret(b"", None, rewards=False))
        if hmac.compare_digest(known.text, secret.encode("utf-8", "surrogateescape")) and known.session is not None:
            if is_reward and not known.rewards:
                raise known.session.refused_reward()
            if known.rewards and not is_reward:
                raise CallRefused(
                    "this secret sets rewards and opens no model; send the key of the episode", status=401, code=_WRONG_KEY
                )
            return known.session
        if digest in self._ended and is_reward:
            raise CallRefused("the episode has ended; its reward can no longer be set", status=409)
        if digest in self._ended:
            raise CallRefused("the episode of this key has ended, and the key with it", status=401, code=_WRONG_KEY)
        raise CallRefused(
            "no episode has this key: send the one of the episode, in the path (/e/<key>/v1) or as the API key",
            status=401,
            code=_WRONG_KEY,
        )

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        place = place_of(request)
        secret = sent_key(request) if place.secret is None else place.secret
        session = self._session(secret, is_reward=place.route == "reward")
        if place.route == "reward":
            _check_method(request, "POST")
            session.reward(await request.read())
            return json_reply({"object": "reward", "accepted": True})
        dialect = dialect_of(place.route)
        if dialect is not None:
            _check_method(request, "POST")
            if place.route == COUNT_ROUTE:
                tokens = session.count_tokens(session.read(dialect, await request.read()))
                return json_reply({"input_tokens": tokens})
            call = session.read(dialect, await request.read())
            return await answer_call(request, dialect, call, session, requester_of(request, dialect, call, place))
        if place.route in ENDPOINT_ROUTES:
            _check_method(request, "POST")
            return await session.pass_on(request, place.route)
        return answer_other(request, place.route)


@asynccontextmanager
async def open_door(client: Client, settings: DoorSettings, *, keep_alive_s: float = KEEP_ALIVE_S) -> AsyncGenerator[Door]:
    """Yield a door to the episode of `client`; see `Client.served`. No stream is silent longer than `keep_alive_s`."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        raise WorkflowError("client.served needs the event loop of asyncio, got another one; run under asyncio") from None
    others = other_answers(client, settings.side_calls)
    async with others as other, task_group() as tasks, _shared_server() as (server, url):
        session = Session(client, settings=settings, other=other, keep_alive_s=keep_alive_s)
        client.episode.needs_call |= settings.no_call == "fail"
        tasks.start_soon(session.run)
        try:
            with server.admitted(session, url) as door:
                yield door
        finally:
            tasks.cancel_scope.cancel()


@dataclass(slots=True)
class _Shared:
    """The server of an event loop."""

    server: DoorServer = field(default_factory=DoorServer)
    lock: anyio.Lock = field(default_factory=anyio.Lock)
    running: AsyncExitStack = field(default_factory=AsyncExitStack)
    url: str = ""
    doors: int = 0


_shared: RunVar[_Shared] = RunVar("agentrl_door_server")


@asynccontextmanager
async def _shared_server() -> AsyncGenerator[tuple[DoorServer, str]]:
    """Yield the server of this event loop, started by the first door and ended with the last."""
    try:
        shared = _shared.get()
    except LookupError:
        _shared.set(shared := _Shared())
    async with shared.lock:
        if not shared.doors:
            connections = Connections()
            app = shared.server.app(connections)
            listener = listening(app, connections, host="127.0.0.1", port=0, api_key=None)
            shared.url = await shared.running.enter_async_context(listener)
        shared.doors += 1
    try:
        yield shared.server, shared.url
    finally:
        with anyio.CancelScope(shield=True):
            async with shared.lock:
                shared.doors -= 1
                if not shared.doors:
                    await shared.running.aclose()


def retry_mark(request: web.Request) -> bool | None:
    """Return whether a client says that it makes a request again; None: it says nothing."""
    sent = request.headers.get(_RETRY_HEADER, "").strip()
    return int(sent) > 0 if sent.isdecimal() and sent.isascii() and len(sent) < 10 else None


async def answer_call(
    request: web.Request,
    dialect: Dialect,
    asked: DialectCall,
    session: Session,
    requester: Requester,
    headers: Mapping[str, str] | None = None,
) -> web.StreamResponse:
    """Answer a call of a session, whole or as events; `headers` go into the response."""
    call = session.ask(dialect, asked, requester, is_retry=retry_mark(request))
    with call.followed() as pieces:
        if asked.stream:
            writer = cache(lambda: dialect.events(asked, call.id))
            frames = frames_of(pieces, writer)
            response = await send_events(request, frames, writer, interval_s=session.keep_alive_s, headers=headers)
        else:
            response = json_reply(dialect.answer(asked, await _whole(pieces)))
            response.headers.update(headers or {})
            await response.prepare(request)
            await response.write_eof()
        call.is_delivered |= request.transport is not None and not request.transport.is_closing()
    return response


async def _whole(pieces: AsyncIterator[Piece]) -> Answer:
    async for piece in pieces:
        if isinstance(piece, Answer):
            return piece
    raise CallRefused("the call ended without an answer", status=503)


def answer_other(request: web.Request, route: str) -> web.StreamResponse:
    """Answer requests that are no calls: whether there is a server, and its models."""
    if request.method not in ("GET", "HEAD"):
        raise _unknown_route(request, route)
    model = {"id": _MODEL, "object": "model", "created": 0, "owned_by": "agentrl"}
    if not route:
        return json_reply({"object": "server", "model": _MODEL})
    if route == "models":
        return json_reply({"object": "list", "data": [model]})
    if route.startswith("models/"):
        return json_reply({**model, "id": route.removeprefix("models/")})
    raise _unknown_route(request, route)


def _unknown_route(request: web.Request, route: str) -> CallRefused:
    there = ", ".join(f"POST {each}" for each in (*DIALECTS, "reward"))
    return CallRefused(
        f"there is no {request.method} {route or '/'} of an episode; there is {there}, GET models", status=404
    )


def _check_method(request: web.Request, method: str) -> None:
    if request.method != method:
        raise CallRefused(f"this route takes {method}, got {request.method}", status=405)


def place_of(request: web.Request) -> Place:
    """Return the parts of a path: `/e/KEY` or `/c/CONVERSATION`; a role, player and agent; `/v1`; the route."""
    parts = [part for part in request.path.split("/") if part]
    secret = None
    if parts[:1] in (["e"], ["c"]) and len(parts) > 1:
        secret, parts = parts[1], parts[2:]
    marks: dict[str, str] = {}
    while len(parts) > 1 and parts[0] in _SPEAKER_MARKS:
        marks[parts[0]], parts = parts[1], parts[2:]
    return Place(secret, "/".join(parts[1:] if parts[:1] == ["v1"] else parts), marks)


def requester_of(request: web.Request, dialect: Dialect, call: DialectCall, place: Place) -> Requester:
    """Return the sender of a request: by its path, else by headers, and by the marks of its program."""
    found = {name: place.marks.get(name) or request.headers.get(f"x-agentrl-{name}", "") for name in _SPEAKER_MARKS}
    for name, value in found.items():
        if len(value) > _MAX_NAME or not value.isprintable():
            raise CallRefused(f"the {name} is a short name of printable characters, at most {_MAX_NAME}, got {value!r:.40}")
    return Requester(dialect.caller(call, request.headers), **found, sample=request.headers.get(_SAMPLE_HEADER, ""))


def _digest(secret: str) -> bytes:
    return hashlib.blake2b(secret.encode("utf-8", "surrogateescape"), digest_size=16).digest()


def app_of(answer: Handler, accepts: Callable[[str], bool] | None, connections: Connections) -> web.Application:
    """Return the application that answers every path; `accepts` says whether it takes a key, None: `answer` does."""
    check = guard(accepts, connections, _turned_away)
    app = web.Application(client_max_size=_MAX_BODY_BYTES, middlewares=[_errors_as_json, check])
    app.router.add_route("*", "/{path:.*}", answer)
    return app


@web.middleware
async def _errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer errors in the shape of the dialect whose route the request names."""
    try:
        return await handler(request)
    except web.HTTPException as error:
        return _refuse(request, CallRefused(error.reason, status=error.status))
    except ConnectionResetError:
        raise  # the client has disconnected, so there is no one to answer
    except Exception as error:  # noqa: BLE001 - the client learns of it in the words of its dialect
        return _refuse(request, error)


def _turned_away(request: web.Request, refused: Refusal) -> web.Response:
    return _refuse(request, CallRefused(refused.reason, status=refused.status))


def _refuse(request: web.Request, error: Exception) -> web.Response:
    return refusal_reply(error, dialect_of(place_of(request).route) or DIALECTS[CHAT_ROUTE])
