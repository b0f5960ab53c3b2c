"""The interface of a sandbox, whatever isolates it, and a pool that runs a bounded number of programs at a time.

Invariant: a sandbox runs anything a model wrote. What the program does is in the `Result`; what the sandbox fails to do is
an `EnvironmentFault`. Callers of a pool get their turn in the order in which they came; waiting does not count as running.
"""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Protocol

import anyio

from agentrl.errors import ConfigError
from agentrl.support.concurrency import outside_work
from agentrl_sandbox.box import Starter, open_forks, open_session, run_in_box
from agentrl_sandbox.session import Session
from agentrl_sandbox.types import Limits, Program, Result, check_files
from agentrl_sandbox.usage_record import note_use


class Sandbox(Protocol):
    """Runs programs, each in a new sandbox. Calls without limits have those that the sandbox was made with."""

    @property
    def name(self) -> str:
        """The backend, such as `bubblewrap`."""
        ...

    @property
    def is_isolated(self) -> bool:
        """Whether programs are kept from this machine; False for the backend whose name says unsafe."""
        ...

    @property
    def limits(self) -> Limits:
        """Those of calls that bring none."""
        ...

    async def run(self, program: Program, limits: Limits | None = None) -> Result:
        """Run `program` to its end or to a limit, and leave nothing of it behind, also when it is cancelled.

        Raises:
            EnvironmentFault: the sandbox could not do its part.
        """
        ...

    def session(
        self, *, files: Mapping[str, bytes] | None = None, limits: Limits | None = None, port: int | None = None
    ) -> AbstractAsyncContextManager[Session]:
        """Open a sandbox for many calls, with a Python, a shell and a working directory that keep their state.

        Args:
            files: first contents of the working directory.
            limits: of the session, and of each call.
            port: a port of this machine's loopback that programs reach under the same number, and nothing else.

        Raises:
            ConfigError: a path leaves the working directory, or the backend has no way to a port.
            EnvironmentFault: the sandbox could not be started.
        """
        ...

    def forks(self, *, limits: Limits | None = None) -> AbstractAsyncContextManager[Session]:
        """Open a sandbox with a warm Python; `Session.run_python` forks it, each time behind walls of the program's own.

        Raises:
            ConfigError: this backend has no walls between the programs of one sandbox.
            EnvironmentFault: the sandbox could not be started.
        """
        ...


class BoxSandbox:
    """A sandbox on this machine; its starter isolates the programs.

    Args:
        name: of the backend.
        starter: of the boxes.
        supervisor: Python and the path of the supervisor of sessions, as the boxes see them.
        is_isolated: whether programs are kept from this machine.
        limits: of calls that bring none.
        forks: Python and the path of `inside/programs.py`; None: the backend cannot part the programs of one sandbox.
        has_passages: whether boxes can have a way to a port of this machine.
    """

    def __init__(
        self,
        name: str,
        starter: Starter,
        supervisor: tuple[str, ...],
        *,
        is_isolated: bool,
        limits: Limits | None = None,
        forks: tuple[str, ...] | None = None,
        has_passages: bool = False,
    ) -> None:
        self.name, self.is_isolated, self.limits = name, is_isolated, limits or Limits()
        self._starter, self._supervisor, self._forks = starter, supervisor, forks
        self._has_passages = has_passages

    async def run(self, program: Program, limits: Limits | None = None) -> Result:
        """Run `program` as `Sandbox.run` describes."""
        note_use(is_isolated=self.is_isolated)
        return await run_in_box(self._starter, program, limits or self.limits)

    def session(
        self, *, files: Mapping[str, bytes] | None = None, limits: Limits | None = None, port: int | None = None
    ) -> AbstractAsyncContextManager[Session]:
        """Open a session as `Sandbox.session` describes."""
        check_files(files or {})
        if port is not None and self.is_isolated and not self._has_passages:
            raise no_passage(self.name)
        note_use(is_isolated=self.is_isolated)
        way = port if self.is_isolated else None  # without walls there is nothing in the way
        return open_session(self._starter, self._supervisor, limits or self.limits, files, way)

    def forks(self, *, limits: Limits | None = None) -> AbstractAsyncContextManager[Session]:
        """Open a warm Python as `Sandbox.forks` describes."""
        if self._forks is None:
            raise ConfigError(
                f"sandbox: the backend {self.name} cannot keep the programs of one warm interpreter apart; use the backend "
                "bubblewrap, or start each program in a sandbox of its own (`start: cold`)"
            )
        note_use(is_isolated=self.is_isolated)
        return open_forks(self._starter, self._forks, limits or self.limits)


class SandboxPool:
    """Bounds another sandbox; keep one for the whole process.

    Args:
        sandbox: runs the programs.
        max_running: programs at a time; None: as many as this process may use cores.
        max_sessions: sessions at a time, beside these programs; each holds up to its memory limit.
    """

    def __init__(self, sandbox: Sandbox, *, max_running: int | None = None, max_sessions: int = 64) -> None:
        self._sandbox = sandbox
        self.name, self.is_isolated, self.limits = sandbox.name, sandbox.is_isolated, sandbox.limits
        self.max_running = max_running or len(os.sched_getaffinity(0))
        self.max_sessions = max_sessions
        self._running = anyio.Semaphore(self.max_running)
        self._sessions = anyio.Semaphore(max_sessions)

    async def run(self, program: Program, limits: Limits | None = None) -> Result:
        """Run `program` as `Sandbox.run` does when there is a free slot; the result's `queue_s` is the time until then."""
        came_s = anyio.current_time()
        with outside_work():
            async with self._running:
                queue_s = anyio.current_time() - came_s
                return replace(await self._sandbox.run(program, limits), queue_s=queue_s)

    @asynccontextmanager
    async def forks(self, *, limits: Limits | None = None) -> AsyncGenerator[Session]:
        """Open a warm Python, as `Sandbox.forks` describes, when one of the pool's sessions is free."""
        async with self._sessions, self._sandbox.forks(limits=limits) as session:
            yield session

    @asynccontextmanager
    async def session(
        self, *, files: Mapping[str, bytes] | None = None, limits: Limits | None = None, port: int | None = None
    ) -> AsyncGenerator[Session]:
        """Open a session, as `Sandbox.session` describes, when one of the pool's is free."""
        async with AsyncExitStack() as stack:
            with outside_work():
                await stack.enter_async_context(self._sessions)
                session = await stack.enter_async_context(self._sandbox.session(files=files, limits=limits, port=port))
            yield session


def no_passage(backend: str) -> ConfigError:
    """Return the error for a backend whose boxes reach no port of this machine."""
    return ConfigError(
        f"sandbox: programs of the backend {backend} cannot reach a port of this machine; use the backend bubblewrap, or "
        "run the program outside"
    )
