"""A sandbox that runs a bounded number of programs at a time, for many callers.

Invariant: callers get their turn in the order in which they came, and waiting does not count as running.
"""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace

import anyio

from agentrl.concurrency import outside_work
from agentrl.sandbox.base import Sandbox
from agentrl.sandbox.session import Session
from agentrl.sandbox.types import Limits, Program, Result


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
        self, *, files: Mapping[str, bytes] | None = None, limits: Limits | None = None
    ) -> AsyncGenerator[Session]:
        """Open a session, as `Sandbox.session` describes, when one of the pool's is free."""
        async with AsyncExitStack() as stack:
            with outside_work():
                await stack.enter_async_context(self._sessions)
                session = await stack.enter_async_context(self._sandbox.session(files=files, limits=limits))
            yield session
