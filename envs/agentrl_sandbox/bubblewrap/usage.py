"""The memory and the files that a sandbox holds: by its control group, or from outside through its own `/proc`.

Invariant: only the sandbox's processes are counted. Until the sandbox's own `/proc` is in place there is no reading. A
reading runs in a thread, and its descriptors live until it ends. `docs/adr/0029-memory-of-programs.md` has the reasons.

Where this process manages a part of cgroup v2, a sandbox enters its group before anything of it starts, so the kernel counts
every byte and process of it.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

from agentrl_sandbox.box import Used
from agentrl_sandbox.types import MIB, Limits

_DRIVER: Final = "agentrl-driver"
"""The group into which this process moves: a group with processes cannot give controllers to groups below it."""
_CONTROLLERS: Final = ("memory", "pids")
_OWN_PROCESSES: Final = 5
"""Those of bubblewrap outside the namespace of the sandbox, and those of a warm Python between it and its programs."""
_NUMBERS: Final = itertools.count()
"""Of the groups of this process, whose sandboxes may share a parent."""
KEPT_IN_MEMORY: Final = ("work", "tmp", "dev/shm")
"""Directories of a sandbox whose contents live in memory."""
MOST_ENDED: Final = 1000
"""The `oom_score_adj` of processes that the kernel ends first when the machine runs out of memory."""
_CPU_S: Final = 0.5
"""CPU seconds for the exact part of a reading; beyond them pages that processes share count fully for each."""
_SLOW_S: Final = 0.2
"""Seconds between two readings of mappings, descriptors and locks, which take longest."""
_SLOW_CPU_S: Final = 0.1
"""CPU seconds for the mappings, and for the descriptors, of one reading: enough for 100,000 of them."""
_MAPPING: Final = 384
"""Bytes that the kernel keeps for each mapping of a process."""
_LOCK: Final = 256
"""Bytes that the kernel keeps for each lock on a part of a file."""
_FEW_DESCRIPTORS: Final = 512
_PIPE: Final = 65_536
_PIPES_IN_FULL: Final = 64 * 2**20
"""Bytes of a user's pipes beyond which the kernel gives each further pipe no more than `_SMALL_PIPE`."""
_SMALL_PIPE: Final = 8192


class ControlGroup:
    """The group of one sandbox; one that cannot be made is an OSError."""

    def __init__(self, path: Path, limits: Limits) -> None:
        path.mkdir()
        self.path = path
        self._most = limits.memory_mb * MIB
        (path / "memory.max").write_text(str(self._most))
        with suppress(FileNotFoundError):  # a kernel without swap
            (path / "memory.swap.max").write_text("0")
        (path / "memory.oom.group").write_text("1")
        (path / "pids.max").write_text(str(limits.processes + _OWN_PROCESSES))

    @property
    def entry(self) -> str:
        """The file into which a process writes 0 to enter."""
        return str(self.path / "cgroup.procs")

    def memory(self) -> int:
        """Return the bytes in use; more than the limit once the kernel has ended the processes for them."""
        used = int((self.path / "memory.current").read_text())
        return max(used, self._most + 1) if self.ran_out() else used

    def ran_out(self) -> bool:
        """Return whether the kernel has ended the processes for their memory."""
        events = (line.split() for line in (self.path / "memory.events").read_text().splitlines())
        return any(name == "oom_kill" and int(count) > 0 for name, count in events)

    def kill(self) -> None:
        """End every process."""
        with suppress(OSError):  # before Linux 5.14; the namespace ends them all the same
            (self.path / "cgroup.kill").write_text("1")

    def remove(self) -> None:
        """Remove the group, which has no process any more."""
        with suppress(OSError):
            self.path.rmdir()


class ControlGroups:
    """Makes groups below one that is this process's to manage."""

    def __init__(self, parent: Path) -> None:
        self._parent = parent

    def make(self, limits: Limits) -> ControlGroup:
        """Return a new group with these limits."""
        return ControlGroup(self._parent / f"agentrl-{os.getpid()}-{next(_NUMBERS)}", limits)


def find_control_groups(mount: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> ControlGroups | None:
    """Return the groups below this process's own, which it must be alone in and may write; None: there are none.

    This process then moves into a group of its own below that one, which cgroup v2 demands.
    """
    try:
        [path] = [line[3:] for line in own.read_text().splitlines() if line.startswith("0::")]
        group = mount / path.strip("/")
        if group.name == _DRIVER:
            return ControlGroups(group.parent)
        offered = (group / "cgroup.controllers").read_text().split()
        members = (group / "cgroup.procs").read_text().split()
        if not set(_CONTROLLERS) <= set(offered) or members != [str(os.getpid())]:
            return None
        (group / _DRIVER).mkdir(exist_ok=True)
        (group / _DRIVER / "cgroup.procs").write_text(str(os.getpid()))
        (group / "cgroup.subtree_control").write_text(" ".join(f"+{name}" for name in _CONTROLLERS))
    except (OSError, ValueError):
        return None
    return ControlGroups(group)


class Usage:
    """Reads one sandbox. Needs the rights of its user, or of root."""

    def __init__(
        self,
        pid: int,
        namespace: int,
        ceiling: int,
        group: ControlGroup | None = None,
        folders: tuple[str, ...] = KEPT_IN_MEMORY,
    ) -> None:
        """Prepare to read the sandbox whose first process is `pid`, in the process namespace with inode `namespace`.

        Below `ceiling` bytes an upper bound is as good as the exact sum, which takes longer to read. Where there is a
        control group, the kernel has the sum.
        """
        self._group = group
        self._pid, self._namespace, self._ceiling = pid, namespace, ceiling
        self._processes = -1
        self._names = folders
        self._folders: list[int] = []
        self._slow_s = -_SLOW_S
        self._slow_bytes = 0
        self._mappings: dict[str, int] = {}
        self._unix_socket = _default_buffer()
        self._in_use = threading.Lock()
        self._is_closed = False

    def read(self) -> Used | None:
        """Return what the sandbox holds; None before the start and after the end. Runs in a thread, one at a time."""
        try:
            with self._in_use:
                if self._is_closed or (self._processes < 0 and not self._open()):
                    return None
                with suppress(FileNotFoundError, ProcessLookupError):  # it ends just now
                    return self._used()
                return None
        finally:
            if self._is_closed:
                self.close()

    def close(self) -> None:
        """Close the descriptors, which keep a dead sandbox's memory alive; a reading that runs closes them at its end."""
        self._is_closed = True
        if self._in_use.acquire(blocking=False):
            for descriptor in (*self._folders, self._processes):
                if descriptor >= 0:
                    os.close(descriptor)
            self._folders, self._processes = [], -1
            self._in_use.release()

    def _open(self) -> bool:
        opened: list[int] = []
        try:
            root = os.open(f"/proc/{self._pid}/root", os.O_PATH | os.O_DIRECTORY)
            opened.append(root)
            processes = os.open("proc", os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=root)
            opened.append(processes)
            # Before its mounts are in place the process still sees those of the machine.
            if os.stat("1/ns/pid", dir_fd=processes).st_ino != self._namespace:
                raise FileNotFoundError("not the sandbox's own /proc")
            for folder in self._names:
                found = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=root)
                opened.append(found)
        except OSError:
            for descriptor in opened:
                os.close(descriptor)
            return False
        os.close(root)
        self._processes, self._folders = processes, opened[2:]
        return True

    def _used(self) -> Used:
        pids = [name for name in os.listdir(self._processes) if name.isdecimal()]
        kept = self._directories(pids)
        files = sum(found.f_files - found.f_ffree for found in kept)
        is_due = time.monotonic() - self._slow_s >= _SLOW_S
        if is_due:
            self._stay_first_to_end(pids)
            self._slow_s = time.monotonic()
        if self._group is not None:
            return Used(self._group.memory(), files)
        if is_due:
            self._slow_bytes = self._mapping_records(pids) + self._pipes(pids) + self._locks()
            self._slow_s = time.monotonic()
        private = {pid: self._private(pid) for pid in pids}
        tables = sum(tables for _, tables in private.values())
        contents = sum((found.f_blocks - found.f_bfree) * found.f_frsize for found in kept)
        others = tables + contents + self._sockets(pids) + self._slow_bytes
        pages = sum(pages for pages, _ in private.values())
        if others + pages > self._ceiling:
            pages = self._shares(private)
        return Used(others + pages, files)

    def _stay_first_to_end(self, pids: list[str]) -> None:
        """Raise the score of processes that lowered it: those that this process may not forbid to."""
        for pid in pids:
            with suppress(OSError):
                descriptor = os.open(f"{pid}/oom_score_adj", os.O_RDWR, dir_fd=self._processes)
                try:
                    if int(os.read(descriptor, 16)) < MOST_ENDED:
                        os.write(descriptor, b"%d" % MOST_ENDED)
                finally:
                    os.close(descriptor)

    def _one_of_each(self, pids: list[str], kind: str) -> list[str]:
        """Return a process of each namespace of a kind; process 1 stands for the sandbox's own."""
        found: dict[int, str] = {}
        for pid in ("1", *pids):
            with suppress(OSError):
                found.setdefault(os.stat(f"{pid}/ns/{kind}", dir_fd=self._processes).st_ino, pid)
        return list(found.values())

    def _directories(self, pids: list[str]) -> list[os.statvfs_result]:
        """Return the state of the directories in memory: the sandbox's, and those of programs with mounts of their own."""
        found = {os.fstat(folder).st_dev: os.fstatvfs(folder) for folder in self._folders}
        for pid in self._one_of_each(pids, "mnt")[1:]:
            for name in self._names:
                with suppress(OSError):
                    folder = os.open(f"{pid}/root/{name}", os.O_PATH | os.O_NOFOLLOW, dir_fd=self._processes)
                    try:
                        found[os.fstat(folder).st_dev] = os.fstatvfs(folder)
                    finally:
                        os.close(folder)
        return list(found.values())

    def _private(self, pid: str) -> tuple[int, int]:
        """Return the bytes of a process's own pages, in memory or swapped out, and of its page tables."""
        lines = self._lines(f"{pid}/status")
        return _kibibytes(lines, b"RssAnon:", b"VmSwap:"), _kibibytes(lines, b"VmPTE:")

    def _shares(self, private: dict[str, tuple[int, int]]) -> int:
        """Return the pages of all processes, each page once, as far as the time for it suffices."""
        began_s = time.thread_time()
        total = 0
        for pid, (pages, _) in private.items():
            if time.thread_time() - began_s < _CPU_S:
                lines = self._lines(f"{pid}/smaps_rollup")  # empty of a process that has ended since
                pages = _kibibytes(lines, b"Pss_Anon:", b"SwapPss:") if lines else self._private(pid)[0]
            total += pages
        return total

    def _sockets(self, pids: list[str]) -> int:
        """Return a bound of the bytes in sockets: unix ones fill the buffer of the sender, the kernel counts the others."""
        total = 0
        for pid in self._one_of_each(pids, "net"):
            counts = {line.split()[0]: int(line.split()[2]) for line in self._lines(f"{pid}/net/protocols")[1:]}
            total += (counts.get(b"UNIX", 0) + counts.get(b"UNIX-STREAM", 0)) * self._unix_socket
            for name, kind in ((b"TCP", "tcp"), (b"TCPv6", "tcp6"), (b"UDP", "udp"), (b"UDPv6", "udp6")):
                if counts.get(name, 0):
                    total += sum(_queued(line) for line in self._lines(f"{pid}/net/{kind}")[1:])
        return total

    def _mapping_records(self, pids: list[str]) -> int:
        """Return what the kernel keeps of mappings; a process that time did not suffice for has the mean of the others."""
        began_s = time.thread_time()
        known = {pid: self._mappings[pid] for pid in pids if pid in self._mappings}
        for pid in sorted(pids, key=known.__contains__):  # new ones first
            if time.thread_time() - began_s > _SLOW_CPU_S and known:
                break
            known[pid] = sum(piece.count(b"\n") for piece in self._pieces(f"{pid}/maps"))
        self._mappings = known
        return sum(known.values()) * len(pids) // max(len(known), 1) * _MAPPING

    def _locks(self) -> int:
        return sum(piece.count(b"\n") for piece in self._pieces("locks")) * _LOCK

    def _pipes(self, pids: list[str]) -> int:
        """Return a bound of the bytes in pipes, where there are many descriptors."""
        many = 0
        for pid in pids:
            with suppress(OSError):
                size = os.stat(f"{pid}/fd", dir_fd=self._processes).st_size
                many += size or most_descriptors(self._lines(f"{pid}/status"))
        if many <= _FEW_DESCRIPTORS:
            return 0
        began_s = time.thread_time()
        found: set[str] = set()
        for pid in pids:
            with suppress(OSError):
                folder = os.open(f"{pid}/fd", os.O_RDONLY | os.O_DIRECTORY, dir_fd=self._processes)
                try:
                    for name in os.listdir(folder):
                        with suppress(OSError):
                            found.add(os.readlink(name, dir_fd=folder))
                finally:
                    os.close(folder)
            if time.thread_time() - began_s > _SLOW_CPU_S:
                break
        number = sum(target.startswith("pipe:") for target in found)
        return min(number * _PIPE, _PIPES_IN_FULL + number * _SMALL_PIPE)

    def _lines(self, path: str) -> list[bytes]:
        return b"".join(self._pieces(path)).splitlines()

    def _pieces(self, path: str) -> Iterator[bytes]:
        """Yield the contents of a file of the sandbox's `/proc`; none of a process that has ended."""
        with suppress(OSError):
            descriptor = os.open(path, os.O_RDONLY, dir_fd=self._processes)
            try:
                while piece := os.read(descriptor, 65_536):
                    yield piece
            finally:
                os.close(descriptor)


def _kibibytes(lines: list[bytes], *names: bytes) -> int:
    """Return the sum of these fields, in bytes."""
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(names))


def most_descriptors(status: list[bytes]) -> int:
    """Return a bound of how many descriptors a process has; the size of its folder gives it from Linux 6.2 on.

    Example:
        >>> most_descriptors([b"Name: sh", b"FDSize: 256"])
        256
    """
    return sum(int(line.split()[1]) for line in status if line.startswith(b"FDSize:"))


def _queued(line: bytes) -> int:
    """Return a bound of what an internet socket holds: its record, and its queues with the overhead of small packets."""
    sent, _, received = line.split()[4].partition(b":")
    return 4096 + 2 * (int(sent, 16) + int(received, 16))


def _default_buffer() -> int:
    """Return the bytes that a unix socket may hold, on its way to others."""
    with suppress(OSError):
        return int(Path("/proc/sys/net/core/wmem_default").read_text())
    return 212_992  # the kernel's own; containers may not see the setting
