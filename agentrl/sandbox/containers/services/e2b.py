"""E2B, and services that speak its API: each environment is a sandbox of a template, in which a supervisor runs.

The service's API makes and deletes sandboxes; in each one `envd` starts processes, over Connect's JSON messages, each with
five bytes before it. The template needs `python3`, 3.9 or newer.

Invariant: a sandbox is deleted when its block ends, and by the service itself after `lifetime_s`. It has no network.
"""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from typing import Any, Final, cast

import aiohttp
import anyio
import msgspec

from agentrl.concurrency import task_group
from agentrl.errors import ConfigError, EnvironmentFault
from agentrl.sandbox.box import BOX_START_S
from agentrl.sandbox.containers.services.boot import BOOT, boot_message
from agentrl.sandbox.containers.services.copied import IsAlive, WantedEnvironment
from agentrl.sandbox.session import Session
from agentrl.sandbox.types import Ending

ENVD_URL: Final = "https://49983-{sandbox}.{domain}"
"""Where envd of a sandbox answers; a service that places it elsewhere is named in the run file."""
_API_S: Final = 120.0
_INPUT_BYTES: Final = 1 << 20
"""Of the supervisor's input in one request."""
_AS_ROOT: Final = "Basic " + base64.b64encode(b"root:").decode()
_LAST: Final = 2
"""The flag of the last message of a stream."""
_MAX_MESSAGE: Final = 1 << 28


class E2bService:
    """Starts sandboxes of a service.

    Args:
        http: the way to it.
        api_url: of its API, such as `https://api.e2b.app`.
        api_key: of the account.
        envd_url: of a sandbox's envd, with `{sandbox}` and `{domain}`.
        lifetime_s: seconds after which the service deletes a sandbox by itself.
    """

    name = "e2b"

    def __init__(
        self,
        http: aiohttp.ClientSession,
        api_url: str,
        api_key: str,
        *,
        envd_url: str = ENVD_URL,
        lifetime_s: float = 7200.0,
    ) -> None:
        self._http, self._api_url, self._api_key = http, api_url.rstrip("/"), api_key
        self._envd_url, self._lifetime_s = envd_url, lifetime_s

    @asynccontextmanager
    async def start(self, wanted: WantedEnvironment) -> AsyncGenerator[tuple[Session, IsAlive]]:
        """Start a sandbox as `Service.start` describes."""
        asked = {
            "templateID": wanted.image,
            "timeout": int(self._lifetime_s),
            "secure": True,
            "allow_internet_access": False,
            "metadata": {"made_by": "agentrl"},
        }
        made = await self._api("POST", "/sandboxes", asked, (200, 201))
        name = str(made["sandboxID"])

        async def is_alive() -> bool:
            try:
                await self._api("GET", f"/sandboxes/{name}", None, (200,))
            except EnvironmentFault:
                return False
            return True

        try:
            url = self._envd_url.format(sandbox=name, domain=made.get("domain") or "e2b.app")
            envd = _Envd(self._http, url, made.get("envdAccessToken"))
            async with _supervised_there(envd, wanted) as supervisor:
                yield Session(supervisor, wanted.limits), is_alive
        finally:
            with anyio.CancelScope(shield=True):
                await self._api("DELETE", f"/sandboxes/{name}", None, (200, 204, 404))

    async def _api(self, method: str, path: str, body: object, good: tuple[int, ...]) -> dict[str, Any]:
        url = self._api_url + path
        headers = {"X-API-Key": self._api_key}
        try:
            with anyio.fail_after(_API_S):
                async with self._http.request(method, url, json=body, headers=headers) as response:
                    status, data = response.status, await response.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise EnvironmentFault(f"containers: {url}: {type(error).__name__}: {error}") from error
        if status == 401:
            raise ConfigError(f"containers: {url} refuses the key; check containers.api_key_env")
        if status not in good:
            raise EnvironmentFault(f"containers: {url} answered {status}: {data[:300].decode(errors='replace')}")
        return _answer_object(data) if data else {}


class _Envd:
    """The daemon of one sandbox that starts processes."""

    def __init__(self, http: aiohttp.ClientSession, url: str, token: object) -> None:
        self.http, self.url = http, url.rstrip("/")
        self.headers = {"Authorization": _AS_ROOT, "Connect-Protocol-Version": "1"}
        if isinstance(token, str):
            self.headers["X-Access-Token"] = token

    async def send_input(self, pid: int, data: bytes) -> None:
        """Write to the standard input of a process."""
        for start in range(0, len(data), _INPUT_BYTES):
            piece = base64.b64encode(data[start : start + _INPUT_BYTES]).decode()
            body = {"process": {"pid": pid}, "input": {"stdin": piece}}
            url = f"{self.url}/process.Process/SendInput"
            async with self.http.post(url, json=body, headers=self.headers) as response:
                if response.status != 200:
                    raise EnvironmentFault(f"containers: {url} answered {response.status}: {await response.text()}")

    @asynccontextmanager
    async def started(self, argv: list[str], environment: Mapping[str, str]) -> AsyncGenerator[aiohttp.StreamReader]:
        """Start a process and yield the messages about it."""
        process = {"cmd": argv[0], "args": argv[1:], "envs": dict(environment), "cwd": "/"}
        message = json.dumps({"process": process, "stdin": True}).encode()
        headers = {**self.headers, "Content-Type": "application/connect+json"}
        url = f"{self.url}/process.Process/Start"
        async with self.http.post(url, data=struct.pack(">BI", 0, len(message)) + message, headers=headers) as response:
            if response.status != 200:
                raise EnvironmentFault(f"containers: {url} answered {response.status}: {await response.text()}")
            yield response.content


class E2bSupervisor:
    """The way to a supervisor in a sandbox."""

    def __init__(self, envd: _Envd) -> None:
        self.ending = Ending.KILLED
        self._envd, self._pid = envd, 0
        self._said = bytearray()
        self._frames, self._replies = anyio.create_memory_object_stream[bytes](1)
        self._has_started = anyio.Event()
        self._is_open = True

    async def begin(self, message: bytes) -> None:
        """Bring the supervisor there, and wait for its first word; one that fails is an EnvironmentFault."""
        with anyio.move_on_after(BOX_START_S):
            await self._has_started.wait()
            if self._is_open:
                await self._envd.send_input(self._pid, message)
                if await self._reply() is not None:
                    return
        said = self._said.decode(errors="replace").strip()
        raise EnvironmentFault(f"containers: no supervisor starts in a sandbox: {said or 'it said nothing'}")

    async def ask(self, request: bytes, timeout_s: float) -> bytes | None:
        """Send a request and return its reply; None: the supervisor has ended. A cancelled request ends the way to it."""
        if not self._is_open:
            return None
        reply = None
        try:
            with anyio.move_on_after(timeout_s) as patience:
                await self._envd.send_input(self._pid, struct.pack(">I", len(request)) + request)
                reply = await self._reply()
        except (aiohttp.ClientError, OSError) as error:
            raise EnvironmentFault(f"containers: {self._envd.url}: {type(error).__name__}: {error}") from error
        finally:
            self._is_open = reply is not None
        if patience.cancelled_caught:
            self.ending = Ending.TIMEOUT
        return reply

    async def _reply(self) -> bytes | None:
        try:
            return await self._replies.receive()
        except anyio.EndOfStream:
            return None

    def close(self) -> None:
        """Close the ends of the stream of replies."""
        self._frames.close()
        self._replies.close()

    async def read(self, messages: aiohttp.StreamReader) -> None:
        """Take what the process writes, and its end."""
        data = bytearray()
        async with self._frames:
            try:
                while True:
                    flags, length = struct.unpack(">BI", await messages.readexactly(5))
                    if length > _MAX_MESSAGE:
                        raise EnvironmentFault(f"containers: {self._envd.url} sends a message of {length} bytes")
                    message = await messages.readexactly(length)
                    if flags & _LAST or not await self._take(_answer_object(message).get("event", {}), data):
                        break
            except (aiohttp.ClientError, EOFError, OSError) as error:
                self._said += f"{type(error).__name__}: {error}".encode()
            finally:
                self._is_open = False
                self._has_started.set()

    async def _take(self, event: dict[str, Any], data: bytearray) -> bool:
        """Take one event; return False at the end of the process."""
        if "start" in event:
            self._pid = int(event["start"]["pid"])
            self._has_started.set()
        output = event.get("data", {})
        self._said = (self._said + base64.b64decode(output.get("stderr", "")))[-4096:]
        data += base64.b64decode(output.get("stdout", ""))
        while len(data) >= 4 and len(data) >= 4 + (length := struct.unpack(">I", data[:4])[0]):
            await self._frames.send(bytes(data[4 : 4 + length]))
            del data[: 4 + length]
        return "end" not in event


@asynccontextmanager
async def _supervised_there(envd: _Envd, wanted: WantedEnvironment) -> AsyncGenerator[E2bSupervisor]:
    supervisor = E2bSupervisor(envd)
    argv = ["python3", "-I", "-S", "-c", BOOT]
    try:
        async with envd.started(argv, wanted.environment) as messages, task_group() as tasks:
            tasks.start_soon(supervisor.read, messages)
            await supervisor.begin(boot_message(wanted.limits, dict(wanted.environment)))
            yield supervisor
            tasks.cancel_scope.cancel()
    except (aiohttp.ClientError, OSError) as error:
        raise EnvironmentFault(f"containers: {envd.url}: {type(error).__name__}: {error}") from error
    finally:
        supervisor.close()


def _answer_object(data: bytes) -> dict[str, Any]:
    try:
        return cast("dict[str, Any]", msgspec.json.decode(data))
    except msgspec.DecodeError as error:
        raise EnvironmentFault(f"containers: the service's answer is no JSON: {error}") from error


@asynccontextmanager
async def open_e2b(api_url: str, api_key: str, *, envd_url: str = ENVD_URL) -> AsyncGenerator[E2bService]:
    """Connect to a service. Needs the asyncio event loop."""
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=30.0)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(trust_env=False, timeout=timeout, connector=connector, read_bufsize=1 << 20) as http:
        yield E2bService(http, api_url, api_key, envd_url=envd_url)
