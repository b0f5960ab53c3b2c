"""A sandbox on another machine, over HTTP: the protocol and its client.

Its server is `agentrl_sandbox.hosts.sandbox_server`.

Bodies are JSON; contents and outputs are base64. Where the server has a key, requests carry `Authorization: Bearer KEY`.

| request | body | answer |
|---|---|---|
| GET /health | - | 200 `{"name", "is_isolated"}` of the server's own sandbox, and the `maxima` of limits |
| POST /run | `ProgramBody` | 200 `Result` |
| POST /sessions | `SessionBody` | 200 `{"session": ID}` |
| POST /sessions/ID | `CallBody` | 200 what the supervisor answers; 410 `{"ended": REASON}`: its sandbox has ended |
| DELETE /sessions/ID | - | 200; also for a session that is gone |

Other answers are `{"error": TEXT}`: 400 for a bad request or a limit over the server's maximum, 401 for a wrong key, 403 for
what a web page could have sent, 404 for a session that is gone, 408 for a late body, 415 for a compressed one, 429 when as
many sessions are open as the server allows, 503 when the server's sandbox could not do its part. A client that closes the
connection ends its program, or the session of its call.

Invariant: whatever goes wrong on the way is an `EnvironmentFault`, never a result.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from typing import Protocol, TypeVar

import aiohttp
import anyio
import msgspec

from agentrl.errors import ConfigError, EnvironmentFault
from agentrl_sandbox.base import no_passage
from agentrl_sandbox.session import REPLY_GRACE_S, Session, session_over
from agentrl_sandbox.types import Ending, Limits, Program, Result, check_files
from agentrl_sandbox.usage_record import note_use

_ROUND_TRIP_S = 30.0
"""Seconds that a request may take beyond what the program may take, its wait for a slot of the server's pool included."""
_RETRY_S = 0.5
"""Seconds between two attempts to open a session where the server has as many as it allows."""
_DELETE_S = 5.0
"""Seconds that a server has to end a session; one that does not answer ends it when it is idle."""
Body = TypeVar("Body")


class ProgramBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A program to run."""

    argv: tuple[str, ...]
    files: dict[str, bytes] = {}
    stdin: bytes = b""
    environment: dict[str, str] = {}
    limits: dict[str, float | int | None] | None = None
    """Fields of `Limits`; None: the server's."""


class SessionBody(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """A session to open."""

    files: dict[str, bytes] = {}
    limits: dict[str, float | int | None] | None = None
    forks: bool = False
    """Whether it is to fork a warm Python, as `Sandbox.forks` does, and nothing else; such a session has no files."""


class CallBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A request to the supervisor of a session."""

    request: msgspec.Raw
    timeout_s: float


class HealthBody(msgspec.Struct):
    """The sandbox of the server."""

    name: str
    is_isolated: bool
    maxima: dict[str, float | int | None] = {}
    """Fields of `Limits`: the most that the server gives; empty where it does not say."""


class _Opened(msgspec.Struct):
    session: str


class _Gone(msgspec.Struct):
    ended: Ending = Ending.KILLED
    error: str = ""


class RemoteSandbox:
    """Runs programs on another machine. Needs the asyncio event loop; `open_remote` makes one."""

    def __init__(self, http: aiohttp.ClientSession, url: str, health: HealthBody, limits: Limits) -> None:
        self.name, self.is_isolated = f"remote {health.name}", health.is_isolated
        self.limits = limits
        self._http, self._url = http, url

    async def run(self, program: Program, limits: Limits | None = None) -> Result:
        """Run `program` as `Sandbox.run` describes; a cancelled caller closes the connection, which ends the program."""
        note_use(is_isolated=self.is_isolated)
        chosen = limits or self.limits
        body = ProgramBody(
            argv=program.argv,
            files=dict(program.files),
            stdin=program.stdin,
            environment=dict(program.environment),
            limits=chosen.model_dump(),
        )
        status, answer = await self.send("POST", "/run", msgspec.json.encode(body), chosen.wall_s)
        return decode_answer(self._checked("/run", status, answer), Result)

    def session(
        self, *, files: Mapping[str, bytes] | None = None, limits: Limits | None = None, port: int | None = None
    ) -> AbstractAsyncContextManager[Session]:
        """Open a session as `Sandbox.session` describes."""
        if port is not None:
            raise no_passage(self.name)
        check_files(files or {})
        note_use(is_isolated=self.is_isolated)
        return self._session(files, limits or self.limits)

    def forks(self, *, limits: Limits | None = None) -> AbstractAsyncContextManager[Session]:
        """Open a warm Python as `Sandbox.forks` describes; what the server's sandbox cannot is an EnvironmentFault."""
        note_use(is_isolated=self.is_isolated)
        return self._session(None, limits or self.limits, forks=True)

    @asynccontextmanager
    async def _session(
        self, files: Mapping[str, bytes] | None, limits: Limits, *, forks: bool = False
    ) -> AsyncGenerator[Session]:
        body = SessionBody(limits=limits.model_dump(), forks=forks)
        opened = decode_answer(await self._open(msgspec.json.encode(body)), _Opened)
        supervisor = RemoteSupervisor(self, f"/sessions/{opened.session}")
        try:
            async with session_over(supervisor, limits, files) as session:
                yield session
        finally:
            await supervisor.close()

    async def _open(self, body: bytes) -> bytes:
        """Open a session; where the server has as many as it allows, try again for `_ROUND_TRIP_S`."""
        until = anyio.current_time() + _ROUND_TRIP_S
        while True:
            status, answer = await self.send("POST", "/sessions", body, 0)
            if status != 429 or anyio.current_time() >= until:
                return self._checked("/sessions", status, answer)
            await anyio.sleep(_RETRY_S)

    def _checked(self, path: str, status: int, answer: bytes) -> bytes:
        if status != 200:
            raise EnvironmentFault(f"sandbox: {self._url}{path} answered {status}: {said_in(answer)}")
        return answer

    async def send(self, method: str, path: str, body: bytes, patience_s: float) -> tuple[int, bytes]:
        """Send one request and return status and body; no answer within `patience_s` and the time of the way is a fault."""
        try:
            with anyio.fail_after(patience_s + _ROUND_TRIP_S):
                async with self._http.request(method, self._url + path, data=body) as response:
                    return response.status, await response.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise EnvironmentFault(f"sandbox: {self._url}{path}: {type(error).__name__}: {error}") from error


class RemoteServer(Protocol):
    """A server, as its supervisors are reached."""

    async def send(self, method: str, path: str, body: bytes, patience_s: float) -> tuple[int, bytes]:
        """Send one request and return status and body; no answer within `patience_s` and the time of the way is a fault."""
        ...


class RemoteSupervisor:
    """The way to a supervisor behind a server, where it has a path of its own."""

    def __init__(self, server: RemoteServer, path: str) -> None:
        self.ending = Ending.KILLED
        self._server, self._path = server, path
        self._is_open = True

    async def ask(self, request: bytes, timeout_s: float) -> bytes | None:
        """Send a request and return its reply; None: the sandbox has ended. A cancelled request ends the session."""
        if not self._is_open:
            return None
        body = msgspec.json.encode(CallBody(request=msgspec.Raw(request), timeout_s=timeout_s))
        try:
            status, answer = await self._server.send("POST", self._path, body, timeout_s + REPLY_GRACE_S)
        except BaseException:
            await self.close()
            raise
        if status == 410:
            self.ending, self._is_open = decode_answer(answer, _Gone).ended, False
            return None
        if status != 200:
            raise EnvironmentFault(f"sandbox: {self._path} answered {status}: {said_in(answer)}")
        return answer

    async def close(self) -> None:
        """End the session at the server; a server that cannot be reached ends it when it is idle."""
        self._is_open = False
        with anyio.move_on_after(_DELETE_S, shield=True), suppress(EnvironmentFault):
            await self._server.send("DELETE", self._path, b"", 0)


@asynccontextmanager
async def open_remote(
    url: str, *, api_key: str | None = None, limits: Limits | None = None
) -> AsyncGenerator[RemoteSandbox]:
    """Connect to a server and yield its sandbox. Needs the asyncio event loop.

    Args:
        url: of the server, such as `http://10.0.0.7:8700`.
        api_key: the server's; None where it has none.
        limits: of calls that bring none.

    Raises:
        ConfigError: the server does not answer, or refuses the key.
    """
    headers = {"Content-Type": "application/json"}
    if api_key is not None:
        headers["Authorization"] = f"Bearer {api_key}"
    async with aiohttp.ClientSession(headers=headers, trust_env=False) as http:
        probe = RemoteSandbox(http, url.rstrip("/"), HealthBody("", is_isolated=True), limits or Limits())
        try:
            status, answer = await probe.send("GET", "/health", b"", 0)
        except EnvironmentFault as error:
            raise ConfigError(f"{error}; start one with `python -m agentrl_sandbox.hosts.sandbox_server`") from error
        if status != 200:
            raise ConfigError(f"sandbox: {url} answered {status}: {said_in(answer)}; check the address and the key")
        health, limits = decode_answer(answer, HealthBody), limits or Limits()
        if health.maxima and (over := exceeded(limits, Limits.model_validate(health.maxima))) is not None:
            raise ConfigError(f"sandbox: {url}: {over}")
        yield RemoteSandbox(http, url.rstrip("/"), health, limits)


def exceeded(limits: Limits, maxima: Limits, flag: Callable[[str, float], str] | None = None) -> str | None:
    """Return which of `limits` is over the server's; None: none is.

    Args:
        limits: that a program asks for.
        maxima: of the server.
        flag: returns the option of the server's command that allows a limit; None: that of the sandbox server.

    Example:
        >>> exceeded(Limits(wall_s=60), Limits(wall_s=10))
        'limits.wall_s: expected at most 10, the most of this server (--max wall_s=60), got 60'
    """
    for (name, value), (_, most) in zip(limits, maxima, strict=True):
        if value is not None and most is not None and value > most:
            option = f"--max {name}={value:g}" if flag is None else flag(name, value)
            said = f" ({option})" if option else ""
            return f"limits.{name}: expected at most {most:g}, the most of this server{said}, got {value:g}"
    return None


def said_in(answer: bytes) -> str:
    """Return the reason in a server's refusal."""
    with suppress(msgspec.DecodeError):
        return msgspec.json.decode(answer, type=_Gone).error
    return answer[:200].decode(errors="replace")


def decode_answer(answer: bytes, kind: type[Body]) -> Body:
    """Return the body of an answer; one that is not of this kind is an EnvironmentFault."""
    try:
        return msgspec.json.decode(answer, type=kind)
    except msgspec.DecodeError as error:
        raise EnvironmentFault(f"sandbox: the server's answer is not what the protocol says: {error}") from error
