"""E2B, and services that speak its API: each environment is a sandbox of a template, in which a supervisor runs.

The service's API makes and deletes sandboxes; in each one `envd` starts processes, over Connect's JSON messages, each with
five bytes before it. The template needs `python3`, 3.9 or newer.

Invariant: a sandbox is deleted when its block ends, and by the service itself after `lifetime_s`. It has no network.
"""

from __future__ import annotations

import base64
import errno
import json
import struct
from collections.abc import AsyncGenerator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from typing import Any, Final, cast

import aiohttp
import anyio
import msgspec

from agentrl.concurrency import task_group
from agentrl.errors import ConfigError, EnvironmentFault
from agentrl.sandbox.box import BOX_START_S
from agentrl.sandbox.containers.services.boot import BOOT, boot_message
from agentrl.sandbox.containers.services.copied import StartedEnvironment, WantedEnvironment
from agentrl.sandbox.containers.services.relayed_port import BytePipe
from agentrl.sandbox.session import Session
from agentrl.sandbox.types import Ending

ENVD_URL: Final = "https://49983-{sandbox}.{domain}"
"""Where envd of a sandbox answers; a service that places it elsewhere is named in the run file."""
_API_S: Final = 120.0
_INPUT_BYTES: Final = 1 << 20
"""Of the supervisor's input in one request."""
_AS_ROOT: Final = "Basic " + base64.b64encode(b"root:").decode()
_PYTHON: Final = ("python3", "-I", "-S", "-B", "-c")
_NEWS_S: Final = 5.0
"""Seconds for the news of an end to come, after a process took no input."""
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
    async def start(self, wanted: WantedEnvironment) -> AsyncGenerator[StartedEnvironment]:
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
                yield StartedEnvironment(Session(supervisor, wanted.limits), is_alive, partial(_run_python_there, envd))
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


class E2bProcess:
    """A process of a sandbox; a `BytePipe`."""

    def __init__(self, envd: _Envd) -> None:
        self._envd, self._pid = envd, 0
        self._said = bytearray()
        self._output, self._pieces = anyio.create_memory_object_stream[bytes](1)
        self._has_started = anyio.Event()
        self._has_ended = anyio.Event()

    @property
    def said(self) -> str:
        """The end of what it wrote to standard error, or the reason why nothing more comes from it."""
        return self._said.decode(errors="replace").strip()

    async def send(self, data: bytes) -> None:
        """Write to its standard input, once it runs; one that has ended is a BrokenPipeError.

        Raises:
            EnvironmentFault: the service does not take it although the process runs.
        """
        await self._has_started.wait()
        if self._has_ended.is_set():
            raise BrokenPipeError(errno.EPIPE, "the process has ended")
        try:
            await self._envd.send_input(self._pid, data)
        except (aiohttp.ClientError, EnvironmentFault) as error:
            with anyio.move_on_after(_NEWS_S):  # its end may be on its way
                await self._has_ended.wait()
                raise BrokenPipeError(errno.EPIPE, "the process has ended") from error
            raise EnvironmentFault(f"containers: {self._envd.url}: {type(error).__name__}: {error}") from error

    async def receive(self) -> bytes:
        """Return the next bytes of its standard output, or none at the end."""
        try:
            return await self._pieces.receive()
        except anyio.EndOfStream:
            return b""

    async def read(self, messages: aiohttp.StreamReader) -> None:
        """Take what the process writes, and its end."""
        async with self._output:
            try:
                while True:
                    flags, length = struct.unpack(">BI", await messages.readexactly(5))
                    if length > _MAX_MESSAGE:
                        raise EnvironmentFault(f"containers: {self._envd.url} sends a message of {length} bytes")
                    message = await messages.readexactly(length)
                    if flags & _LAST or not await self._take(_answer_object(message).get("event", {})):
                        break
            except (aiohttp.ClientError, EOFError, OSError) as error:
                self._said += f"{type(error).__name__}: {error}".encode()
            finally:
                self._has_ended.set()
                self._has_started.set()

    async def _take(self, event: dict[str, Any]) -> bool:
        """Take one event; return False at the end of the process."""
        if "start" in event:
            self._pid = int(event["start"]["pid"])
            self._has_started.set()
        output = event.get("data", {})
        self._said = (self._said + base64.b64decode(output.get("stderr", "")))[-4096:]
        if piece := base64.b64decode(output.get("stdout", "")):
            await self._output.send(piece)
        return "end" not in event

    def close(self) -> None:
        """Close the ends of the stream of its output."""
        self._output.close()
        self._pieces.close()


class E2bSupervisor:
    """The way to a supervisor in a sandbox."""

    def __init__(self, process: E2bProcess) -> None:
        self.ending = Ending.KILLED
        self._process, self._came = process, bytearray()
        self._is_open = True

    async def begin(self, message: bytes) -> None:
        """Bring the supervisor there, and wait for its first word; one that fails is an EnvironmentFault."""
        with anyio.move_on_after(BOX_START_S), suppress(BrokenPipeError):
            await self._process.send(message)
            if await self._reply() is not None:
                return
        raise EnvironmentFault(f"containers: no supervisor starts in a sandbox: {self._process.said or 'it said nothing'}")

    async def ask(self, request: bytes, timeout_s: float) -> bytes | None:
        """Send a request and return its reply; None: the supervisor has ended. A cancelled request ends the way to it."""
        if not self._is_open:
            return None
        reply = None
        try:
            with anyio.move_on_after(timeout_s) as patience:
                with suppress(BrokenPipeError):
                    await self._process.send(struct.pack(">I", len(request)) + request)
                    reply = await self._reply()
        finally:
            self._is_open = reply is not None
        if patience.cancelled_caught:
            self.ending = Ending.TIMEOUT
        return reply

    async def _reply(self) -> bytes | None:
        while len(self._came) < 4 or len(self._came) < (end := 4 + struct.unpack_from(">I", self._came)[0]):
            if not (piece := await self._process.receive()):
                return None
            self._came += piece
        data = bytes(self._came[4:end])
        del self._came[:end]
        return data


@asynccontextmanager
async def _process_there(envd: _Envd, argv: list[str], environment: Mapping[str, str]) -> AsyncGenerator[E2bProcess]:
    """Start a process in a sandbox and yield it; it ends with its standard input, or with the sandbox."""
    process = E2bProcess(envd)
    async with AsyncExitStack() as stack:
        stack.callback(process.close)
        try:
            messages = await stack.enter_async_context(envd.started(argv, environment))
        except (aiohttp.ClientError, OSError) as error:
            raise EnvironmentFault(f"containers: {envd.url}: {type(error).__name__}: {error}") from error
        tasks = await stack.enter_async_context(task_group())
        tasks.start_soon(process.read, messages)
        yield process
        tasks.cancel_scope.cancel()


@asynccontextmanager
async def _supervised_there(envd: _Envd, wanted: WantedEnvironment) -> AsyncGenerator[E2bSupervisor]:
    async with _process_there(envd, [*_PYTHON, BOOT], wanted.environment) as process:
        supervisor = E2bSupervisor(process)
        await supervisor.begin(boot_message(wanted.limits, dict(wanted.environment)))
        yield supervisor


@asynccontextmanager
async def _run_python_there(envd: _Envd, program: str, arguments: tuple[str, ...]) -> AsyncGenerator[BytePipe]:
    async with _process_there(envd, [*_PYTHON, program, *arguments], {}) as process:
        yield process


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
