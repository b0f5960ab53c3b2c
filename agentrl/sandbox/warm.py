"""Runs short Python programs in forks of a warm interpreter: a few milliseconds each instead of the start of a sandbox.

Invariant: each program has namespaces of its own for processes, mounts, network and IPC, directories of its own and no
rights. It sees neither the interpreter nor another program, and all of it has ended before the next one starts. Where the
machine or the backend cannot do that, nothing runs.
"""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Final

import anyio
from anyio.abc import ObjectReceiveStream, ObjectSendStream

from agentrl.concurrency import outside_work, task_group
from agentrl.errors import ConfigError, EnvironmentFault
from agentrl.sandbox.base import Sandbox
from agentrl.sandbox.pool import SandboxPool
from agentrl.sandbox.types import Limits, Program, Result
from agentrl.sandbox.wallcheck import check_walls

_PROGRAMS_PER_SESSION: Final = 500
_AT_START: Final = {"PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1"}
"""The settings of the warm interpreter that Python reads once; a program that brings others starts a Python of its own."""


@dataclass(slots=True, kw_only=True, eq=False)
class _Request:
    program: Program
    limits: Limits
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    done: anyio.Event = field(default_factory=anyio.Event)
    result: Result | None = None
    fault: EnvironmentFault | None = None


class WarmPython:
    """Runs Python programs; `open_warm_python` makes one."""

    def __init__(self, sandbox: Sandbox | SandboxPool, limits: Limits, requests: ObjectSendStream[_Request]) -> None:
        """Send programs to the sessions that read `requests`."""
        self._sandbox, self._limits, self._requests = sandbox, limits, requests

    async def run(self, program: Program, limits: Limits | None = None) -> Result:
        """Run `python3 PATH.py ...`, a file of the program, as `Sandbox.run` does; the sandbox itself runs all else.

        The result has no `peak_memory_bytes`; `wall_s` begins with the fork. A program that passes a limit by which its
        session ends, of memory or files, is run again by the sandbox itself.

        Raises:
            EnvironmentFault: the sandbox could not do its part.

        Cancellation: the session that runs the program has ended first.
        """
        with outside_work():
            return await self._run(program, limits or self._limits)

    async def _run(self, program: Program, limits: Limits) -> Result:
        if not _can_fork(program):
            return await self._sandbox.run(program, limits)
        request = _Request(program=program, limits=limits)
        await self._requests.send(request)
        try:
            await request.done.wait()
        except anyio.get_cancelled_exc_class():
            request.scope.cancel()
            with anyio.CancelScope(shield=True):
                await request.done.wait()
            raise
        if request.result is None:
            raise request.fault or EnvironmentFault("sandbox: the warm interpreters were closed while a program ran")
        if request.result.state_lost:  # with it, the session lost what the program wrote
            return await self._sandbox.run(program, limits)
        return request.result


@asynccontextmanager
async def open_warm_python(
    sandbox: Sandbox | SandboxPool, *, limits: Limits | None = None, sessions: int | None = None
) -> AsyncGenerator[WarmPython]:
    """Open sessions of `sandbox` when programs come, and yield what runs programs in them; a self-test comes first.

    Args:
        sandbox: where the sessions live.
        limits: of programs that bring none. A session has those of its program, and another replaces it for others.
        sessions: programs at a time; None: one for each core that this process may use.

    Raises:
        ConfigError: `sessions` is below 1, or the programs of a session would not be apart here.

    Cancellation: every process of the sessions is dead first.
    """
    count = len(os.sched_getaffinity(0)) if sessions is None else sessions
    if count < 1:
        raise ConfigError(f"open_warm_python: sessions must be at least 1, got {count}")
    await check_walls(sandbox)
    send, receive = anyio.create_memory_object_stream[_Request]()
    async with task_group() as tasks:
        for _ in range(count):
            tasks.start_soon(_keep_sessions, sandbox, receive.clone())
        receive.close()
        with send:
            yield WarmPython(sandbox, limits or Limits(), send)


async def _keep_sessions(sandbox: Sandbox | SandboxPool, requests: ObjectReceiveStream[_Request]) -> None:
    """Serve requests in one session after another until no more can come."""
    async with requests:
        waiting: _Request | None = None
        while True:
            if waiting is None:
                try:
                    waiting = await requests.receive()
                except anyio.EndOfStream:
                    return
            waiting = await _serve_in_session(sandbox, requests, waiting)


async def _serve_in_session(
    sandbox: Sandbox | SandboxPool, requests: ObjectReceiveStream[_Request], first: _Request
) -> _Request | None:
    """Serve `first` and the requests after it until the session is used up; return a request that needs another session."""
    request, limits = first, first.limits
    try:
        async with sandbox.forks(limits=limits) as session:
            for served in range(_PROGRAMS_PER_SESSION):
                if request.limits != limits:
                    return request
                try:
                    with request.scope:
                        request.result = await session.run_python(request.program)
                except EnvironmentFault:
                    if served:  # it did not begin, and a new session may do what this one does no longer
                        return request
                    raise
                request.done.set()
                if request.result is None or request.result.state_lost:
                    return None
                request = await requests.receive()
            return request
    except anyio.EndOfStream:
        return None
    except EnvironmentFault as fault:
        request.fault = fault
        request.done.set()
        return None
    except BaseException:
        request.done.set()
        raise


def _can_fork(program: Program) -> bool:
    """Return whether a Python that has started already can become `program`."""
    command, *arguments = program.argv
    settings = {name: value for name, value in program.environment.items() if name.startswith("PYTHON")}
    return (
        command == "python3" and bool(arguments) and arguments[0] in program.files and settings.items() <= _AT_START.items()
    )
