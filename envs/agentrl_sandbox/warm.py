"""Runs short Python programs in forks of a warm interpreter: a few milliseconds each instead of the start of a sandbox.

Invariant: each program has namespaces of its own for processes, mounts, network and IPC, directories of its own and no
rights. It sees neither the interpreter nor another program, and all of it has ended before the next one starts. A self-test
of two programs, of which the first leaves as much behind as it can, comes first: where they are not apart, nothing runs.
"""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Final

import anyio
import msgspec
from anyio.abc import ObjectReceiveStream, ObjectSendStream

from agentrl.errors import ConfigError, EnvironmentFault
from agentrl.support.concurrency import outside_work, task_group
from agentrl_sandbox.base import Sandbox
from agentrl_sandbox.types import Limits, Program, Result, python_program

_PROGRAMS_PER_SESSION: Final = 500
_AT_START: Final = {"PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1"}
"""The settings of the warm interpreter that Python reads once; a program that brings others starts a Python of its own."""
_LIMITS: Final = Limits(wall_s=60, processes=24, memory_mb=192, work_mb=8, temp_mb=8, shared_mb=4, open_files=64, cpu_s=15)
_PROBE: Final = r"""
import ctypes, json, os, resource, socket, time
status = dict(line.split(":", 1) for line in open("/proc/self/status").read().splitlines())
rights = ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")
def size(path):
    return os.statvfs(path).f_blocks * os.statvfs(path).f_frsize
def is_free(name):
    global held
    held = socket.socket(socket.AF_UNIX)
    try:
        held.bind(name)
    except OSError:
        return False
    return True
folders = ("/work", "/tmp", "/dev/shm")
names = ("NPROC", "AS", "FSIZE", "NOFILE", "CORE", "CPU")
print(json.dumps({
    "processes": sorted(int(name) for name in os.listdir("/proc") if name.isdecimal()),
    "own": [1, os.getpid()],
    "uid": os.getuid(),
    "rights": [status[name].strip().strip("0") for name in rights],
    "seccomp": int(status["Seccomp"]),
    "no_new_privileges": int(status["NoNewPrivs"]),
    "can_unshare": ctypes.CDLL(None).unshare(0x10000000) == 0,
    "descriptors": len(os.listdir("/proc/self/fd")) - 1,
    "left": [folder for folder in folders if set(os.listdir(folder)) - {"main.py"}],
    "sizes": [size(path) for path in folders],
    "limits": [resource.getrlimit(getattr(resource, "RLIMIT_" + name))[0] for name in names],
    "blocking": [os.get_blocking(number) for number in (0, 1, 2)],
    "name_is_free": is_free("\0agentrl-wallcheck"),
}), flush=True)
for folder in folders:
    open(folder + "/left", "w").close()
for number in (0, 1, 2):
    os.set_blocking(number, False)
if os.fork() == 0:
    os.setsid()
    time.sleep(600)
"""


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

    def __init__(self, sandbox: Sandbox, limits: Limits, requests: ObjectSendStream[_Request]) -> None:
        self._sandbox, self._limits, self._requests = sandbox, limits, requests

    async def run(self, program: Program, limits: Limits | None = None) -> Result:
        """Run `python3 PATH.py ...`, a file of the program, as `Sandbox.run` does; the sandbox itself runs all else.

        The result has no `peak_memory_bytes`; `wall_s` begins with the fork. A program that passes a limit by which its
        session ends, of memory or files, is run again by the sandbox itself.
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
    sandbox: Sandbox, *, limits: Limits | None = None, sessions: int | None = None
) -> AsyncGenerator[WarmPython]:
    """Open sessions of `sandbox` when programs come, and yield what runs programs in them; a self-test comes first.

    Args:
        sandbox: where the sessions live.
        limits: of programs that bring none. A session has those of its program, and another replaces it for others.
        sessions: programs at a time; None: one for each core that this process may use.

    Raises:
        ConfigError: `sessions` is below 1, or the programs of a session would not be apart here.
    """
    count = len(os.sched_getaffinity(0)) if sessions is None else sessions
    if count < 1:
        raise ConfigError(f"open_warm_python: sessions must be at least 1, got {count}")
    await _check_walls(sandbox)
    send, receive = anyio.create_memory_object_stream[_Request]()
    async with task_group() as tasks:
        for _ in range(count):
            tasks.start_soon(_keep_sessions, sandbox, receive.clone())
        receive.close()
        with send:
            yield WarmPython(sandbox, limits or Limits(), send)


async def _keep_sessions(sandbox: Sandbox, requests: ObjectReceiveStream[_Request]) -> None:
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


async def _serve_in_session(sandbox: Sandbox, requests: ObjectReceiveStream[_Request], first: _Request) -> _Request | None:
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


class _WallReport(msgspec.Struct):
    processes: list[int]
    own: list[int]
    uid: int
    rights: list[str]
    seccomp: int
    no_new_privileges: int
    can_unshare: bool
    descriptors: int
    left: list[str]
    sizes: list[int]
    limits: list[int]
    blocking: list[bool]
    name_is_free: bool


async def _check_walls(sandbox: Sandbox) -> None:
    """Run two programs in forks of one warm interpreter; a ConfigError if the second found anything of the first."""
    try:
        async with sandbox.forks(limits=_LIMITS) as session:
            results = [await session.run_python(python_program(_PROBE)) for _ in range(2)]
    except EnvironmentFault as error:
        raise ConfigError(_not_apart(str(error))) from error
    found = [hole for result in results for hole in _open_walls(_read_walls(result))]
    if found:
        raise ConfigError(_not_apart("; ".join(dict.fromkeys(found))))


def _not_apart(said: str) -> str:
    return (
        f"sandbox: programs in forks of one warm interpreter are not apart on this machine: {said}. Allow namespaces within "
        "the user namespace of bubblewrap, or start each program in a sandbox of its own (`start: cold`)"
    )


def _read_walls(result: Result) -> _WallReport:
    try:
        return msgspec.json.decode(result.stdout, type=_WallReport)
    except msgspec.DecodeError as error:
        raise ConfigError(_not_apart(f"the self-test did not run to its end: {result.text[-400:] or error}")) from error


def _open_walls(report: _WallReport) -> Iterator[str]:
    """Yield what each wall let through."""
    if report.processes != report.own:
        yield f"a program sees the processes {report.processes} instead of its own {report.own}"
    if report.uid == 0 or any(report.rights):
        yield f"a program has the user {report.uid} and the capabilities {report.rights}"
    if report.seccomp != 2 or not report.no_new_privileges or report.can_unshare:
        yield "the system call filter does not apply"
    if report.descriptors != 3 or not all(report.blocking):
        yield f"a program has {report.descriptors} descriptors, of which these block: {report.blocking}"
    if report.left:
        yield f"a program finds files of the one before in {', '.join(report.left)}"
    if not report.name_is_free:
        yield "a program shares the network of the one before"
    if report.sizes != (wanted := [size << 20 for size in (_LIMITS.work_mb, _LIMITS.temp_mb, _LIMITS.shared_mb)]):
        yield f"the directories hold {report.sizes} bytes instead of {wanted}"
    memory, space = _LIMITS.memory_mb << 20, max(_LIMITS.work_mb, _LIMITS.temp_mb) << 20
    if report.limits[1:] != (wanted := [memory, space, _LIMITS.open_files, 0, _LIMITS.cpu_s]):
        yield f"the limits of processes are {report.limits[1:]} instead of {wanted}"
