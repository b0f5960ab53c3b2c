"""The way to one host: its requests, and the supervisors of its sessions. Needs the asyncio event loop.

Invariant: whatever goes wrong on the way is an `EnvironmentFault` that names the host, never a result.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from typing import Final, TypeVar

import aiohttp
import anyio
import msgspec

from agentrl.errors import ConfigError, EnvironmentFault
from agentrl_sandbox.remote.wire import CallBody, EndedBody, FileError
from agentrl_sandbox.session import REPLY_GRACE_S
from agentrl_sandbox.types import Ending

_CONNECT_S: Final = 10.0
_DELETE_S: Final = 5.0
"""Seconds that a host has to end a session; one that does not answer ends it when it is idle."""
Body = TypeVar("Body")


class NoRoom(EnvironmentFault):
    """A host has no room for what it is asked to open."""


class HostConnection:
    """The way to one host.

    Args:
        url: its address, such as `http://10.0.0.7:8700`.
        http: what `open_http` yields.
        grace_s: seconds that a request may take beyond what it waits for.
    """

    def __init__(self, url: str, http: aiohttp.ClientSession, *, grace_s: float) -> None:
        self.url, self._http, self._grace_s = url.rstrip("/"), http, grace_s

    async def request(self, method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
        """Send one request and return status and body; errors are those of aiohttp."""
        async with self._http.request(method, self.url + path, data=body or None) as response:
            return response.status, await response.read()

    async def send(self, method: str, path: str, body: bytes, patience_s: float) -> tuple[int, bytes]:
        """Send one request and return status and body; no answer within `patience_s` and the time of the way is a fault."""
        try:
            with anyio.fail_after(patience_s + self._grace_s):
                return await self.request(method, path, body)
        except TimeoutError:
            waited_s = patience_s + self._grace_s
            raise EnvironmentFault(f"sandbox: {self.url}{path}: no answer within {waited_s:g} s") from None
        except (aiohttp.ClientError, OSError) as error:
            raise EnvironmentFault(self.lose(f"{type(error).__name__}: {error}")) from error

    def lose(self, why: str) -> str:
        """Take note that the host does not answer; return the message of the fault."""
        return f"sandbox: {self.url}: {why}"

    async def ask(self, path: str, body: msgspec.Struct | None, kind: type[Body], *, patience_s: float = 0.0) -> Body:
        """Send a body and return the answer.

        Raises:
            OSError: of a file there.
            ConfigError: the host refuses the request.
            NoRoom: it has no room.
            EnvironmentFault: it could not do its part.
        """
        status, answer = await self.send("POST", path, b"" if body is None else msgspec.json.encode(body), patience_s)
        if status == 200:
            return decode_answer(answer, kind)
        if status == 422:
            error = decode_answer(answer, FileError)
            raise OSError(error.number, error.error, error.path)
        said = f"sandbox: {self.url}/{path.split('/')[1]} answered {status}: {said_in(answer)}"
        if status == 400:
            raise ConfigError(said)
        raise NoRoom(said) if status == 429 else EnvironmentFault(said)

    async def close(self, path: str, patience_s: float) -> bytes:
        """Close what was opened there; whatever goes wrong is left to the host, which closes it without this run too."""
        with anyio.move_on_after(patience_s, shield=True), suppress(EnvironmentFault):
            _, answer = await self.send("DELETE", path, b"", patience_s)
            return answer
        return b""


class RemoteSupervisor:
    """The way to a supervisor behind a host, where its session has a path of its own."""

    def __init__(self, host: HostConnection, path: str) -> None:
        self.ending = Ending.KILLED
        self._host, self._path = host, path
        self._is_open = True

    async def ask(self, request: bytes, timeout_s: float) -> bytes | None:
        """Send a request and return its reply; None: the sandbox has ended. A cancelled request ends the session."""
        if not self._is_open:
            return None
        body = msgspec.json.encode(CallBody(request=msgspec.Raw(request), timeout_s=timeout_s))
        try:
            status, answer = await self._host.send("POST", self._path, body, timeout_s + REPLY_GRACE_S)
        except BaseException:
            await self.close()
            raise
        if status == 410:
            self.ending, self._is_open = decode_answer(answer, EndedBody).ended, False
            return None
        if status != 200:
            raise EnvironmentFault(f"sandbox: {self._host.url}{self._path} answered {status}: {said_in(answer)}")
        return answer

    async def close(self) -> None:
        """End the session at the host; a host that cannot be reached ends it when it is idle."""
        self._is_open = False
        await self._host.close(self._path, _DELETE_S)


@asynccontextmanager
async def open_http(api_key: str | None) -> AsyncGenerator[aiohttp.ClientSession]:
    """Yield the way to hosts that have this key; None: they have none."""
    headers = {"Content-Type": "application/json"}
    if api_key is not None:
        headers["Authorization"] = f"Bearer {api_key}"
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S)
    async with aiohttp.ClientSession(headers=headers, trust_env=False, connector=connector, timeout=timeout) as http:
        yield http


class _Refused(msgspec.Struct):
    error: str = ""


def said_in(answer: bytes) -> str:
    """Return the reason in a host's refusal."""
    with suppress(msgspec.DecodeError):
        return msgspec.json.decode(answer, type=_Refused).error
    return answer[:200].decode(errors="replace")


def decode_answer(answer: bytes, kind: type[Body]) -> Body:
    """Return the body of an answer; one that is not of this kind is an EnvironmentFault."""
    try:
        return msgspec.json.decode(answer, type=kind)
    except msgspec.DecodeError as error:
        raise EnvironmentFault(f"sandbox: the host's answer is not what the protocol says: {error}") from error
