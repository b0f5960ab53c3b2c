"""The self-test: programs that try to break out, run before the first real one.

Invariant: a sandbox that does not hold is refused before it runs anything of a model, with the reason and the fix.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import msgspec

from agentrl.errors import ConfigError, EnvironmentFault
from agentrl_sandbox.box import Starter, run_in_box
from agentrl_sandbox.bubblewrap.usage import MOST_ENDED
from agentrl_sandbox.types import MIB, Ending, Limits, Program, Result, python_program

_LIMITS: Final = Limits(
    wall_s=20, processes=24, memory_mb=192, work_mb=8, temp_mb=8, shared_mb=4, open_files=64, cpu_s=15, num_files=512
)
_VARIABLES: Final = frozenset({"PATH", "HOME", "LANG", "TMPDIR", "PWD", "LC_CTYPE"})
"""LC_CTYPE is Python's own."""
_ROOT: Final = frozenset(
    {"bin", "dev", "etc", "lib", "lib32", "lib64", "libx32", "proc", "run", "sbin", "tmp", "usr", "work"}
)
_PROBE: Final = r"""
import json, mmap, os, resource, socket, sys
port = int(sys.argv[1])
root = sorted(os.listdir("/"))
status = dict(line.split(":", 1) for line in open("/proc/self/status").read().splitlines())
size = lambda path: os.statvfs(path).f_blocks * os.statvfs(path).f_frsize
limit = lambda name: resource.getrlimit(getattr(resource, "RLIMIT_" + name))[1]
def can(action):
    try:
        action()
    except (OSError, ValueError):
        return False
    return True
places = ["/", "/usr", "/etc", "/dev", "/run", "/proc/sys/kernel/core_pattern"]
writable = [p for p in places if can(lambda: open(p if os.path.isfile(p) else p + "/x", "r+" if os.path.isfile(p) else "w"))]
report = {
    "owns_system": os.stat("/usr").st_uid == os.getuid(),
    "uid": os.getuid(),
    "variables": sorted(os.environ),
    "processes": len([name for name in os.listdir("/proc") if name.isdecimal()]),
    "connects": can(lambda: socket.create_connection(("127.0.0.1", port), 2)),
    "root": root,
    "writable": writable,
    "kernel_command_line": can(lambda: open("/proc/cmdline").read()),
    "seccomp": int(status["Seccomp"]),
    "no_new_privileges": int(status["NoNewPrivs"]),
    "capabilities": int(status["CapEff"], 16) | int(status["CapBnd"], 16) | int(status["CapPrm"], 16),
    "descriptors": len(os.listdir("/proc/self/fd")) - 1,
    "sizes": [size(path) for path in ("/work", "/tmp", "/dev/shm")],
    "first_is_open": can(lambda: open("/proc/1/mem", "r+b")),
    "maps_uncounted": can(lambda: mmap.mmap(-1, 4096)) or can(lambda: mmap.mmap(os.open("/dev/zero", os.O_RDWR), 4096)),
    "score": int(open("/proc/self/oom_score_adj").read()),
    "limits": [limit(name) for name in ("AS", "FSIZE", "NOFILE", "NPROC", "CORE", "CPU")],
}
reading, writing = os.pipe()
forks = 0
try:
    while forks < 200:
        if os.fork() == 0:
            os.close(writing)
            os.read(reading, 1)
            os._exit(0)
        forks += 1
except OSError:
    pass
os.close(writing)
report["forks"] = forks
print(json.dumps(report))
"""
_GREEDY: Final = """
import os, time
for _ in range(6):
    if os.fork() == 0:
        kept = b"x" * (96 << 20)
        time.sleep(60)
time.sleep(60)
"""


class _Report(msgspec.Struct):
    owns_system: bool
    """The system's files belong to root outside; to a program that is root outside they seem its own."""
    uid: int
    variables: list[str]
    processes: int
    connects: bool
    root: list[str]
    writable: list[str]
    kernel_command_line: bool
    seccomp: int
    no_new_privileges: int
    capabilities: int
    descriptors: int
    sizes: list[int]
    first_is_open: bool
    maps_uncounted: bool
    score: int
    """By which the kernel chooses what it ends when memory runs out."""
    limits: list[int]
    forks: int


async def check_isolation(starter: Starter, readable: Sequence[str] = ()) -> None:
    """Run the self-test in a sandbox that shows `readable` beside the system; one that does not hold is a ConfigError."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        result = await _try(starter, python_program(_PROBE, arguments=(str(port),)))
    try:
        report = msgspec.json.decode(result.stdout, type=_Report)
    except msgspec.DecodeError as error:
        raise ConfigError(f"sandbox: its self-test did not run to its end: {result.text[-400:] or error}") from error
    found = list(_holes(report, readable))
    greedy = await _try(starter, python_program(_GREEDY))
    if greedy.ended is not Ending.MEMORY:
        found.append(
            f"{_LIMITS.memory_mb} MiB of memory were not the limit of six processes ({greedy.ended}; {greedy.text[-200:]})"
        )
    if found:
        raise ConfigError(
            f"sandbox: bubblewrap does not isolate on this machine: {'; '.join(found)}. Use the packaged bubblewrap on a "
            "kernel with user, process and network namespaces and seccomp, or the docker or remote backend"
        )


async def _try(starter: Starter, program: Program) -> Result:
    try:
        return await run_in_box(starter, program, _LIMITS)
    except EnvironmentFault as error:
        raise ConfigError(f"{error}. {advice()}") from error


def _holes(report: _Report, readable: Sequence[str]) -> Iterator[str]:
    """Yield what each wall let through."""
    if report.owns_system or report.uid == 0:
        yield "programs run as root outside"
    if extra := set(report.variables) - _VARIABLES:
        yield f"programs see the environment: {', '.join(sorted(extra)[:5])}"
    if report.processes > 8:
        yield f"programs see {report.processes} processes"
    if report.connects:
        yield "programs reach the network"
    if seen := set(report.root) - _ROOT - {Path(path).parts[1] for path in readable}:
        yield f"programs see the machine's files in /{', /'.join(sorted(seen)[:5])}"
    if report.writable:
        yield f"programs can write in {', '.join(report.writable)}"
    if report.kernel_command_line:
        yield "programs read the kernel's command line"
    if report.seccomp != 2 or not report.no_new_privileges:
        yield "the system call filter does not apply"
    if report.capabilities:
        yield f"programs hold capabilities ({report.capabilities:#x})"
    if report.descriptors != 3:
        yield f"programs hold {report.descriptors} descriptors instead of 3"
    if any(size > most * MIB for size, most in zip(report.sizes, (8, 8, 4), strict=True)):
        yield "the temporary directories are not limited in size"
    if report.first_is_open:
        yield "programs can write to the memory of process 1 (is the setting fs.suid_dumpable 1?)"
    if report.maps_uncounted:
        yield "programs can map memory that nothing counts"
    if report.score < MOST_ENDED:
        yield f"programs have the out-of-memory score {report.score} instead of {MOST_ENDED}"
    wanted = [_LIMITS.memory_mb * MIB, 8 * MIB, _LIMITS.open_files, _LIMITS.processes, 0, _LIMITS.cpu_s + 1]
    if report.limits != wanted:
        yield f"the limits of processes are {report.limits} instead of {wanted}"
    if report.forks >= _LIMITS.processes:
        yield f"programs started {report.forks} processes, {_LIMITS.processes} is the limit"


def advice(proc: Path = Path("/proc")) -> str:
    """Return why this kernel makes no user namespaces for an unprivileged user, as far as its settings tell, and the fix."""
    wanted = {
        "sys/user/max_user_namespaces": ("0", "sysctl -w user.max_user_namespaces=15000"),
        "sys/kernel/unprivileged_userns_clone": ("0", "sysctl -w kernel.unprivileged_userns_clone=1"),
        "sys/kernel/apparmor_restrict_unprivileged_userns": (
            "1",
            "sysctl -w kernel.apparmor_restrict_unprivileged_userns=0",
        ),
    }
    for name, (blocked, fix) in wanted.items():
        path = proc / name
        if path.exists() and path.read_text().strip() == blocked:
            return (
                f"The kernel forbids user namespaces ({path} is {blocked}); run `{fix}`, or use the docker or remote backend"
            )
    return (
        "If this is a container, its seccomp or AppArmor profile may forbid user namespaces and mounts: start it with "
        "`--security-opt seccomp=unconfined --security-opt apparmor=unconfined --security-opt systempaths=unconfined`, "
        "or use the docker or remote backend"
    )
