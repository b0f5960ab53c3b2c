"""A server that runs programs of other machines in a sandbox of its own.

`python -m agentrl_sandbox.hosts.sandbox_server` runs one.

The protocol is in `agentrl_sandbox.remote`. Invariant: the server listens off loopback only with a key, which every route
asks for; without one it runs nothing that a web page could have sent. No program and no session gets more than the server
gives, whatever its caller asks for. What a client that has gone started is ended: a running call at once, a session `idle_s`
after its last call.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Final

import anyio
import msgspec
from aiohttp import web
from anyio.abc import TaskGroup
from pydantic import ValidationError

from agentrl.errors import AgentRLError, ConfigError
from agentrl.servers.listening import BODY_S, HEADERS_S, Connections, check_address, guard, listening
from agentrl.support.concurrency import task_group
from agentrl_sandbox.base import Sandbox
from agentrl_sandbox.config import SandboxConfig, open_sandbox
from agentrl_sandbox.hosts.holding import Holding
from agentrl_sandbox.hosts.json_answers import encoded, json_refusal, read_body, refused_as_json, turned_away_as_json
from agentrl_sandbox.remote import CallBody, HealthBody, ProgramBody, SessionBody, exceeded
from agentrl_sandbox.session import REPLY_GRACE_S, Session
from agentrl_sandbox.types import Limits, Program

_MAX_BODY: Final = 256 * 2**20
MAX_SESSIONS: Final = 64
MAX_LIMITS: Final = Limits(
    wall_s=3600,
    cpu_s=3600,
    memory_mb=4096,
    address_space_mb=65_536,
    processes=512,
    open_files=4096,
    work_mb=1024,
    temp_mb=1024,
    shared_mb=256,
    num_files=65_536,
    output_kb=16_384,
)
"""The most that a caller may ask for, unless the server's owner gives more or less."""
_MAX_WORD: Final = 128 * 1024
"""Bytes of one argument or variable, with its end; the kernel starts no program with a longer one."""
_MAX_WORDS: Final = 1024 * 1024
"""Bytes of all of them, with a pointer for each: half of what the kernel takes, for the sandbox adds words of its own."""


class SandboxService:
    """Answers the requests of the protocol."""

    def __init__(
        self,
        sandbox: Sandbox,
        tasks: TaskGroup,
        *,
        idle_s: float,
        maxima: Limits = MAX_LIMITS,
        max_sessions: int = MAX_SESSIONS,
    ) -> None:
        """Serve `sandbox`, with `maxima` of the limits that callers may ask for.

        At most `max_sessions` live in `tasks`; each ends `idle_s` seconds after its last call.
        """
        self._sandbox, self._maxima, self._max_sessions = sandbox, maxima, max_sessions
        self._sessions = Holding[Session](tasks, idle_s=idle_s)

    def application(
        self, api_key: str | None = None, connections: Connections | None = None, *, body_s: float = BODY_S
    ) -> web.Application:
        """Return the routes, behind the guard of `agentrl.servers.listening`."""
        check = guard(api_key, connections or Connections(), turned_away_as_json, body_s=body_s)
        app = web.Application(middlewares=[refused_as_json, check], client_max_size=_MAX_BODY)
        app.router.add_get("/health", self._health)
        app.router.add_post("/run", self._run)
        app.router.add_post("/sessions", self._open)
        app.router.add_post("/sessions/{id}", self._call)
        app.router.add_delete("/sessions/{id}", self._close)
        return app

    async def _health(self, request: web.Request) -> web.Response:
        del request
        return encoded(HealthBody(self._sandbox.name, self._sandbox.is_isolated, self._maxima.model_dump()))

    async def _run(self, request: web.Request) -> web.Response:
        body = await read_body(request, ProgramBody)
        program = Program(argv=body.argv, files=body.files, stdin=body.stdin, environment=body.environment)
        _check_words(program)
        return encoded(await self._sandbox.run(program, self._limits_of(body.limits)))

    async def _open(self, request: web.Request) -> web.Response:
        if len(self._sessions) >= self._max_sessions:
            reason = f"{self._max_sessions} sessions are open, the most of this server (--max-sessions); try again later"
            return json_refusal(429, reason)
        body = await read_body(request, SessionBody)
        limits, sandbox = self._limits_of(body.limits), self._sandbox
        opened = sandbox.forks(limits=limits) if body.forks else sandbox.session(files=body.files, limits=limits)
        return encoded({"session": await self._sessions.open(opened)})

    async def _call(self, request: web.Request) -> web.Response:
        body = await read_body(request, CallBody)
        longest = self._maxima.wall_s + REPLY_GRACE_S
        if not 0 <= body.timeout_s <= longest:
            raise ConfigError(f"timeout_s: expected 0 to {longest:g}, the most of this server, got {body.timeout_s:g}")
        with self._sessions.use(request.match_info["id"]) as session:
            if session is None:
                return json_refusal(404, "there is no such session; it may have been idle for too long")
            answer = await session.supervisor.ask(bytes(body.request), body.timeout_s)
            if answer is None:
                return web.json_response({"ended": session.supervisor.ending}, status=410)
        return web.Response(body=answer, content_type="application/json")

    async def _close(self, request: web.Request) -> web.Response:
        self._sessions.cancel(request.match_info["id"])
        return encoded({})

    def _limits_of(self, given: Mapping[str, float | int | None] | None) -> Limits:
        """Return the limits that a caller asks for; for None those of the sandbox, each no more than the server's maximum.

        Raises:
            ConfigError: one is over the server's maximum.
        """
        if given is None:
            own, maxima = dict(self._sandbox.limits), dict(self._maxima)
            return Limits.model_validate({name: _smaller(value, maxima[name]) for name, value in own.items()})
        limits = Limits.model_validate(given)
        over = exceeded(limits, self._maxima)
        if over is not None:
            raise ConfigError(over)
        return limits


@asynccontextmanager
async def serving_sandbox(
    sandbox: Sandbox,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    api_key: str | None = None,
    idle_s: float = 600.0,
    maxima: Limits = MAX_LIMITS,
    max_sessions: int = MAX_SESSIONS,
    headers_s: float = HEADERS_S,
    body_s: float = BODY_S,
) -> AsyncGenerator[str]:
    """Serve `sandbox` inside the block and yield the base URL. Needs the asyncio event loop.

    Args:
        sandbox: runs the programs.
        host: address to listen on.
        port: 0 picks a free one.
        api_key: every request must carry it; None: none needs a key.
        idle_s: seconds without a call after which a session ends.
        maxima: of the limits that a caller may ask for.
        max_sessions: open at a time; a further one is refused.
        headers_s: seconds that a client has to send the headers of a request.
        body_s: seconds that a client has to send the body of a request.

    Raises:
        ConfigError: for an address off loopback without a key, or one that cannot be bound.
    """
    connections = Connections(headers_s)
    async with task_group() as tasks:
        service = SandboxService(sandbox, tasks, idle_s=idle_s, maxima=maxima, max_sessions=max_sessions)
        app = service.application(api_key, connections, body_s=body_s)
        async with listening(app, connections, host=host, port=port, api_key=api_key) as url:
            try:
                yield url
            finally:
                tasks.cancel_scope.cancel()


def _check_words(program: Program) -> None:
    """Refuse a command that the kernel starts no program with.

    Raises:
        ConfigError: a word is too long, or all of them are.
    """
    words = [*program.argv, *(f"{name}={value}" for name, value in program.environment.items())]
    sizes = [len(word.encode(errors="surrogatepass")) + 1 for word in words]
    if max(sizes) > _MAX_WORD or sum(sizes) + 8 * len(sizes) > _MAX_WORDS:
        raise ConfigError(
            f"program: expected arguments and variables of at most {_MAX_WORD} bytes each and {_MAX_WORDS} together, got "
            f"{len(sizes)} of {sum(sizes)} bytes, the longest of {max(sizes)}; pass the data as a file or standard input"
        )


def _smaller(value: float | int | None, most: float | int | None) -> float | int | None:
    return value if value is None or most is None else min(value, most)


async def _serve(options: argparse.Namespace, api_key: str | None, maxima: Limits) -> None:
    config = SandboxConfig(max_running=options.max_running, max_sessions=options.max_sessions)
    with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        async with (
            open_sandbox(config) as pool,
            serving_sandbox(
                pool,
                host=options.host,
                port=options.port,
                api_key=api_key,
                maxima=maxima,
                max_sessions=options.max_sessions,
            ) as url,
        ):
            sys.stdout.write(f"{msgspec.json.encode({'event': 'ready', 'url': url}).decode()}\n")
            sys.stdout.flush()
            async for _ in signals:
                return


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the server until SIGTERM or SIGINT; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m agentrl_sandbox.hosts.sandbox_server", description=(__doc__ or "").split("\n\n")[0]
    )
    add = parser.add_argument
    add("--host", default="127.0.0.1", help="address to listen on (default 127.0.0.1)")
    add("--port", type=int, default=0, help="0 picks a free one")
    add("--api-key-env", help="environment variable with the key that every request must carry")
    add("--max-running", type=int, help="programs at a time (default: one for each core)")
    add("--max-sessions", type=int, default=MAX_SESSIONS, help=f"open sessions at a time (default {MAX_SESSIONS})")
    add(
        "--max",
        action="append",
        default=[],
        metavar="LIMIT=NUMBER",
        help="the most that a caller may ask for; may be repeated. The defaults: "
        + ", ".join(f"{name}={value:g}" for name, value in MAX_LIMITS),
    )
    options = parser.parse_args(arguments)
    try:
        if options.api_key_env is not None and not os.environ.get(options.api_key_env):
            raise ConfigError(f"--api-key-env: the environment variable {options.api_key_env} is not set")
        key = os.environ[options.api_key_env] if options.api_key_env else None
        check_address(options.host, key)
        anyio.run(_serve, options, key, _maxima_of(options.max))
    except (AgentRLError, ValidationError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    return 0


def _maxima_of(given: Sequence[str]) -> Limits:
    """Return `MAX_LIMITS` with the values of `--max`; a `ConfigError` for an option that is not `LIMIT=NUMBER`."""
    chosen: dict[str, object] = dict(MAX_LIMITS)
    for option in given:
        name, equals, value = option.partition("=")
        if not equals or name not in chosen:
            raise ConfigError(f"--max {option}: expected LIMIT=NUMBER, where LIMIT is one of {', '.join(chosen)}")
        chosen[name] = value
    return Limits.model_validate(chosen)


if __name__ == "__main__":
    raise SystemExit(main())
