"""Start and end one bubblewrap, by its command line.

Invariant: every process of a sandbox is in one process namespace, whose first process is killed by a descriptor that cannot
mean another process; the kernel then ends all others before the first is gone. A program sees the
system's libraries read-only, three directories in memory that are limited in size, and nothing else of the machine.
"""

from __future__ import annotations

import math
import os
import select
import signal
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Final, NamedTuple

import anyio
import anyio.to_thread
import msgspec

from agentrl.errors import EnvironmentFault
from agentrl_sandbox.box import KILL_S, Use, Used, wait_until_ready
from agentrl_sandbox.bubblewrap.host import Host, UserIds
from agentrl_sandbox.bubblewrap.usage import KEPT_IN_MEMORY, ControlGroup, ControlGroups, Usage
from agentrl_sandbox.inside import files_inside
from agentrl_sandbox.kernel_limits import limited
from agentrl_sandbox.pipes import PipedProcess, PipeReader
from agentrl_sandbox.types import MIB, Ending, Limits, Program

WORK: Final = "/work"
SUPERVISOR_FOLDER: Final = "/run/agentrl"
FIRST: Final = f"{SUPERVISOR_FOLDER}/sh"
"""The shell that is process 1. Its file can be executed and not read, so the kernel lets no one at that process's memory."""
_SYSTEM: Final = ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
_SETTINGS: Final = ("/etc/ld.so.cache", "/etc/alternatives")
_RIGHTS_OF_WALLS: Final = ("CAP_SYS_ADMIN", "CAP_NET_ADMIN", "CAP_SETPCAP")
"""In the sandbox's own user namespace: for namespaces and mounts, for a loopback, and to give up rights for good."""
_USER: Final = 1000
PASSWD: Final = f"sandbox:x:{_USER}:{_USER}::{WORK}:/bin/sh\n".encode()
SETTLE_S: Final = 60.0
"""Seconds that a start waits while too many killed sandboxes are still ending."""
MAX_ENDING: Final = 8
_SETTLING_S: Final = 0.05
_ENTER: Final = """{ echo 1000 >/proc/self/oom_score_adj; } 2>/dev/null
[ -z "$1" ] || echo 0 >"$1" || exit 1
shift; exec "$@\""""
"""Makes a sandbox what the kernel ends first when memory runs out, and enters its control group."""
_FIRST: Final = 'echo ready >&2; exec 3>&2 2>/dev/null; ( exec "$@" 2>&3 3>&- ); exit $?'
"""Process 1: says that the sandbox stands, waits for the program and collects its orphans. Its own remark on a program that
crashed goes to nowhere."""


def bwrap_arguments(
    host: Host,
    limits: Limits,
    *,
    environment: Mapping[str, str],
    files: Mapping[str, int],
    seccomp: int | None,
    passwd: int,
    shell: int,
    status: int,
) -> list[str]:
    """Return the arguments of `bwrap`, without the program.

    Args:
        host: the programs and trees of the machine.
        limits: sizes of the three directories.
        environment: added to the four variables.
        files: descriptors of contents, by absolute path.
        seccomp: descriptor of the filter; None: the first process has the rights to put programs behind walls of their own.
        passwd: descriptor of the list of users.
        shell: descriptor of the program that is process 1.
        status: descriptor for bubblewrap's report of process id and exit status.
    """
    words = ["--unshare-all", "--unshare-user", "--disable-userns", "--assert-userns-disabled", "--new-session"]
    words += ["--die-with-parent", "--as-pid-1", "--cap-drop", "ALL", "--hostname", "sandbox", "--clearenv"]
    words += ["--uid", str(_USER), "--gid", str(_USER), "--json-status-fd", str(status)]
    for name in _RIGHTS_OF_WALLS if seccomp is None else ():
        words += ["--cap-add", name]
    words += [] if seccomp is None else ["--seccomp", str(seccomp)]
    variables = {"PATH": host.search_path, "HOME": WORK, "LANG": "C.UTF-8", "TMPDIR": "/tmp", **environment}
    for name, value in variables.items():
        words += ["--setenv", name, value]
    words += ["--ro-bind", "/usr", "/usr"]
    for path in _SYSTEM:
        if Path(path).is_symlink():
            words += ["--symlink", os.readlink(path), path]
        elif Path(path).exists():
            words += ["--ro-bind", path, path]
    words += shown_read_only(_SETTINGS)
    words += ["--ro-bind-data", str(passwd), "/etc/passwd", "--dev", "/dev"]
    # It reads as /dev/zero does, and cannot be mapped: such a mapping is shared memory that no process shows.
    words += ["--dev-bind", "/dev/full", "/dev/zero"]
    # Terminals are of all the machine's processes together; /dev/ptmx is a link to one in this folder.
    words += ["--perms", "0555", "--size", "4096", "--tmpfs", "/dev/pts", "--remount-ro", "/dev/pts"]
    words += [*in_memory("/dev/shm", limits.shared_mb), "--remount-ro", "/dev"]
    words += [*in_memory(WORK, limits.work_mb), *in_memory("/tmp", limits.temp_mb)]
    words += shown_read_only(host.readable)  # after /tmp, which would cover what is below it
    for folder in sorted({parent for path in (*files, FIRST) for parent in _parents(path)}):
        words += ["--dir", folder]
    for path, descriptor in files.items():
        words += ["--file", str(descriptor), path]
    words += ["--perms", "0111", "--file", str(shell), FIRST]
    # The watch takes the sandbox's /proc as the sign that everything above is in place.
    words += ["--proc", "/proc"]
    if seccomp is not None:  # the kernel mounts no further /proc where one is covered in part
        words += ["--ro-bind", "/dev/null", "/proc/cmdline", "--ro-bind", "/proc/sys", "/proc/sys"]
    words += ["--remount-ro", "/", "--chdir", WORK]
    return words


def shown_read_only(paths: Sequence[str]) -> list[str]:
    """Return the arguments of `bwrap` that show these paths of the machine, as far as they exist."""
    return [word for path in paths if Path(path).exists() for word in ("--ro-bind", path, path)]


def in_memory(path: str, mebibytes: int) -> list[str]:
    """Return the arguments of `bwrap` that put a directory of this size at `path`."""
    return ["--perms", "0700" if path == WORK else "1777", "--size", str(math.ceil(mebibytes * MIB)), "--tmpfs", path]


def _parents(path: str) -> list[str]:
    return [str(parent) for parent in Path(path).parents if str(parent) not in ("/", WORK, "/run")]


class _Status(msgspec.Struct, rename="kebab", omit_defaults=True):
    """One line that bubblewrap reports."""

    child_pid: int | None = None
    pid_namespace: int | None = None
    exit_code: int | None = None


class BubblewrapBox:
    """A running sandbox; `Starter.start` makes and ends it."""

    def __init__(
        self,
        process: PipedProcess,
        status: PipeReader,
        limits: Limits,
        group: ControlGroup | None,
        folders: tuple[str, ...] = KEPT_IN_MEMORY,
    ) -> None:
        self._folders = folders
        self.stdin, self.stdout, self.stderr = process.stdin, process.stdout, process.stderr
        self._process, self._status, self._limits, self._group = process, status, limits, group
        self._reported = b""
        self._first = -1
        self._usage: Usage | None = None
        self._one_look = anyio.CapacityLimiter(1)
        self._is_started = False
        self._is_killed = False

    async def begin(self) -> None:
        """Wait until the namespace exists, so that it can be killed.

        Cancellation: waits all the same, some milliseconds; a bubblewrap killed before would leave its child behind.
        """
        with anyio.move_on_after(KILL_S, shield=True):
            while b"\n" not in self._reported:
                data = await self._status.receive()
                if not data:
                    return  # it ended before; its standard error has the reason
                self._reported += data
        line = _read_status(self._reported)
        if line.child_pid is None or line.pid_namespace is None:
            return
        with suppress(ProcessLookupError):
            self._first = os.pidfd_open(line.child_pid)
            most = self._limits.memory_mb * MIB
            self._usage = Usage(line.child_pid, line.pid_namespace, most, self._group, self._folders)

    async def wait_until_ready(self) -> None:
        """Wait until everything is in place and process 1 is about to start the program."""
        await wait_until_ready(self.stderr)
        self._is_started = True

    async def wait(self) -> int | Ending | None:
        """Wait for the program's end; None if the sandbox ended before it started the program."""
        await self._process.wait()
        if self._group is not None and self._group.ran_out():
            return Ending.MEMORY
        self._reported += self._status.receive_nowait()
        code = _read_status(self._reported).exit_code
        # Without a report the kernel has ended bubblewrap too, when memory ran out.
        return 128 + signal.SIGKILL if code is None and self._is_started else code

    async def kill(self) -> None:
        """End every process of the namespace; returns `KILL_S` later if the kernel takes that long."""
        if self._is_killed:
            return
        self._is_killed = True
        if self._group is not None:
            self._group.kill()
        with anyio.CancelScope(shield=True):
            # The descriptor means this process and no later one with its number; the kernel then ends the whole
            # namespace.
            if self._first >= 0:
                with suppress(ProcessLookupError):
                    signal.pidfd_send_signal(self._first, signal.SIGKILL)
            else:
                self._process.kill()
            with anyio.move_on_after(KILL_S):
                await self._process.wait()
                if self._first >= 0:
                    await anyio.wait_readable(self._first)

    async def look(self) -> Used | None:
        """Read the memory and the number of files in a thread, since the kernel may take long to answer."""
        if self._usage is None:
            return None
        return await anyio.to_thread.run_sync(self._usage.read, abandon_on_cancel=True, limiter=self._one_look)

    def has_ended(self) -> bool:
        """Return whether no process is alive; the first of a namespace ends last."""
        return self._process.has_ended() and (self._first < 0 or _is_readable(self._first))

    def close(self) -> None:
        """Close the descriptors of a dead sandbox."""
        if self._usage is not None:
            self._usage.close()
        self._status.close()
        if self._first >= 0:
            os.close(self._first)
        self._process.close()
        if self._group is not None:
            self._group.remove()


def _is_readable(descriptor: int) -> bool:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(0))


def _read_status(reported: bytes) -> _Status:
    found = _Status()
    for line in reported.splitlines():
        with suppress(msgspec.DecodeError):  # a line cut off by the end of bubblewrap
            read = msgspec.json.decode(line, type=_Status)
            found.child_pid = read.child_pid or found.child_pid
            found.pid_namespace = read.pid_namespace or found.pid_namespace
            found.exit_code = read.exit_code if read.exit_code is not None else found.exit_code
    return found


class BoxParts(NamedTuple):
    """What the arguments of one `bwrap` are made of."""

    program: Program
    limits: Limits
    use: Use
    descriptors: Mapping[str, int]
    """Those of `seccomp`, `passwd` and `shell`."""
    files: Mapping[str, int]
    """Descriptors of contents, by absolute path."""
    status: int
    """The descriptor for bubblewrap's report."""


class BubblewrapStarter:
    """Starts boxes on this machine."""

    folders: tuple[str, ...] = KEPT_IN_MEMORY
    """Directories of its boxes whose contents count as memory."""
    own_files: Mapping[str, bytes]
    """Files of each box by absolute path, beside those of the program and the supervisor."""

    def __init__(self, host: Host, seccomp: bytes, uids: UserIds, groups: ControlGroups | None = None) -> None:
        """Start with the programs of `host`, under the filter `seccomp`, as one of `uids` where this process is root."""
        self._host, self._seccomp, self._uids, self._groups = host, seccomp, uids, groups
        self.own_files = {}

    @asynccontextmanager
    async def start(self, program: Program, limits: Limits, *, use: Use = "program") -> AsyncGenerator[BubblewrapBox]:
        """Start `program`, yield its box, and kill it when the block ends.

        Raises:
            EnvironmentFault: bubblewrap cannot be started, or too many sandboxes do not end.
        """
        # Killed sandboxes hold memory until the kernel has freed it; starting on would exhaust the machine.
        await self._settle()
        uid = self._uids.take()
        try:
            box = self._launch(program, limits, uid, use)
        except BaseException:
            # No process runs under it, so it is free at once.
            self._uids.give_back_unused(uid)
            raise
        try:
            await box.begin()
            if use == "program":
                await box.wait_until_ready()
            yield box
        finally:
            await box.kill()
            self._uids.give_back(uid, box)

    async def _settle(self) -> None:
        """Wait while the kernel still ends many killed sandboxes, whose memory is not free yet."""
        with anyio.move_on_after(SETTLE_S) as patience:
            while True:
                if self._uids.num_ending() < MAX_ENDING:
                    break
                await anyio.sleep(_SETTLING_S)
        if patience.cancelled_caught:
            raise EnvironmentFault(
                f"sandbox: {MAX_ENDING} sandboxes have not ended {SETTLE_S:g} s after SIGKILL; the machine is overloaded, "
                "or its kernel hangs"
            )

    def _launch(self, program: Program, limits: Limits, uid: int, use: Use) -> BubblewrapBox:
        files = {f"{WORK}/{name}": data for name, data in program.files.items()}
        files |= {f"{SUPERVISOR_FOLDER}/{name}": data for name, data in files_inside(use).items()}
        files |= self.own_files
        if use == "forks":
            files[f"{SUPERVISOR_FOLDER}/seccomp"] = self._seccomp
        argv = list(program.argv)
        if use == "program":
            argv = limited(self._host.prlimit, limits, [FIRST, "-c", _FIRST, "sh", *argv])
        with ExitStack() as stack:
            descriptors = _in_descriptors({**files, "seccomp": self._seccomp, "passwd": PASSWD}, stack)
            descriptors["shell"] = os.open(self._host.shell, os.O_RDONLY)
            stack.callback(os.close, descriptors["shell"])
            reading, writing = os.pipe()
            stack.callback(os.close, writing)
            shown = {path: descriptors[path] for path in files}
            words = self.words(BoxParts(program, limits, use, descriptors, shown, writing))
            listed = b"".join(word.encode(errors="surrogateescape") + b"\0" for word in words)
            descriptors |= _in_descriptors({"arguments": listed}, stack)
            status = PipeReader(reading)
            bwrap = [*self.command(uid), "--args", str(descriptors["arguments"]), *argv]
            group = None
            try:
                group = self._groups.make(limits) if self._groups is not None else None
                process = PipedProcess(
                    [self._host.shell, "-c", _ENTER, "sh", group.entry if group is not None else "", *bwrap],
                    environment={},
                    descriptors=[*descriptors.values(), writing, *program.inherited],
                    directory="/",
                    owner=uid if self._host.setpriv is not None else None,
                )
            except OSError as error:
                status.close()
                if group is not None:
                    group.remove()
                raise EnvironmentFault(f"sandbox: cannot start {self._host.bwrap}: {error}") from error
        return BubblewrapBox(process, status, limits, group, self.folders)

    def words(self, parts: BoxParts) -> list[str]:
        """Return the arguments of `bwrap`."""
        descriptors = parts.descriptors
        return bwrap_arguments(
            self._host,
            parts.limits,
            environment=parts.program.environment,
            files=parts.files,
            seccomp=None if parts.use == "forks" else descriptors["seccomp"],
            passwd=descriptors["passwd"],
            shell=descriptors["shell"],
            status=parts.status,
        )

    def command(self, uid: int) -> list[str]:
        """Return the command before the arguments of `bwrap`."""
        return [*self._host.entry(uid), self._host.bwrap]


def _in_descriptors(contents: Mapping[str, bytes], stack: ExitStack) -> dict[str, int]:
    """Return a descriptor that reads each content; `stack` closes them."""
    found: dict[str, int] = {}
    for name, data in contents.items():
        found[name] = descriptor = os.memfd_create("sandbox")
        stack.callback(os.close, descriptor)
        view = memoryview(data)
        while view:
            view = view[os.write(descriptor, view) :]
        os.lseek(descriptor, 0, os.SEEK_SET)
    return found
