"""The self-test of a warm start: two programs, of which the first leaves as much behind as it can.

Invariant: a warm start whose programs are not apart is refused before it runs anything of a model.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import msgspec

from agentrl.errors import ConfigError, EnvironmentFault
from agentrl.sandbox.base import Sandbox
from agentrl.sandbox.pool import SandboxPool
from agentrl.sandbox.types import Limits, Result, python_program

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


async def check_walls(sandbox: Sandbox | SandboxPool) -> None:
    """Run two programs in forks of one warm interpreter.

    Raises:
        ConfigError: the interpreter does not start here, or a program reached what it must not.

    Cancellation: leaves nothing behind.
    """
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
