"""A sandbox on another machine. Needs the asyncio event loop."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Final, TypeVar

import anyio
import msgspec

from agentrl.errors import ConfigError, EnvironmentFault
from agentrl_sandbox.base import no_passage
from agentrl_sandbox.remote.client import HostConnection, NoRoom, RemoteSupervisor, decode_answer, open_http, said_in
from agentrl_sandbox.remote.wire import HostState, Opened, ProgramBody, SessionBody, exceeded
from agentrl_sandbox.session import Session, session_over
from agentrl_sandbox.types import Limits, Program, Result, check_files
from agentrl_sandbox.usage_record import note_use

_ROUND_TRIP_S: Final = 30.0
"""Seconds that a request may take beyond what the program may take, its wait for a slot of the host's pool included."""
_RETRY_S: Final = 0.5
"""Seconds between two attempts to open a session where the host has as many as it allows."""
Body = TypeVar("Body")


class RemoteSandbox:
    """Runs programs on another machine; `open_remote` makes one."""

    def __init__(self, host: HostConnection, state: HostState, limits: Limits) -> None:
        self.name, self.is_isolated, self.limits = f"remote {state.name}", state.is_isolated, limits
        self._host = host

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
        return await self._ask("/run", body, Result, chosen.wall_s)

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
        """Open a warm Python as `Sandbox.forks` describes; what the host's sandbox cannot is an EnvironmentFault."""
        note_use(is_isolated=self.is_isolated)
        return self._session(None, limits or self.limits, forks=True)

    @asynccontextmanager
    async def _session(
        self, files: Mapping[str, bytes] | None, limits: Limits, *, forks: bool = False
    ) -> AsyncGenerator[Session]:
        opened = await self._open(SessionBody(limits=limits.model_dump(), forks=forks))
        supervisor = RemoteSupervisor(self._host, f"/sessions/{opened.name}")
        try:
            async with session_over(supervisor, limits, files) as session:
                yield session
        finally:
            await supervisor.close()

    async def _open(self, body: SessionBody) -> Opened:
        """Open a session; where the host has as many as it allows, try again for `_ROUND_TRIP_S`."""
        until = anyio.current_time() + _ROUND_TRIP_S
        while True:
            try:
                return await self._ask("/sessions", body, Opened)
            except NoRoom:
                if anyio.current_time() >= until:
                    raise
            await anyio.sleep(_RETRY_S)

    async def _ask(self, path: str, body: msgspec.Struct, kind: type[Body], patience_s: float = 0.0) -> Body:
        """Send a body and return the answer; what the host refuses after it was opened is a fault."""
        try:
            return await self._host.ask(path, body, kind, patience_s=patience_s)
        except (ConfigError, OSError) as error:
            raise EnvironmentFault(str(error)) from error


@asynccontextmanager
async def open_remote(
    url: str, *, api_key: str | None = None, limits: Limits | None = None
) -> AsyncGenerator[RemoteSandbox]:
    """Connect to a host and yield its sandbox. Needs the asyncio event loop.

    Args:
        url: of the host, such as `http://10.0.0.7:8700`.
        api_key: the host's; None where it has none.
        limits: of calls that bring none.

    Raises:
        ConfigError: the host does not answer, refuses the key, runs no programs, or gives less than `limits`.
    """
    limits = limits or Limits()
    async with open_http(api_key) as http:
        host = HostConnection(url, http, grace_s=_ROUND_TRIP_S)
        try:
            status, answer = await host.send("GET", "/state", b"", 0)
        except EnvironmentFault as error:
            raise ConfigError(f"{error}; start one with `agentrl sandbox-host`") from error
        if status != 200:
            raise ConfigError(f"sandbox: {url} answered {status}: {said_in(answer)}; check the address and the key")
        state = decode_answer(answer, HostState)
        if not state.max_sessions:
            raise ConfigError(f"sandbox: {url} runs no programs without a container: its sandbox did not pass its self-test")
        if state.maxima and (over := exceeded(limits, Limits.model_validate(state.maxima))) is not None:
            raise ConfigError(f"sandbox: {url}: {over}")
        yield RemoteSandbox(host, state, limits)
