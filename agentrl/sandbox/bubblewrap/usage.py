"""How much memory and how many files a sandbox holds, read from outside through its own `/proc`.

Invariant: only the sandbox's processes are counted. Until the sandbox's own `/proc` is in place there is no reading. A
reading runs in a thread, and its descriptors live until it ends. `docs/adr/0029-memory-of-programs.md` has the sum's reasons.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

from agentrl.sandbox.box import Used

_FOLDERS: Final = ("work", "tmp", "dev/shm")
_CPU_S: Final = 0.5
"""CPU seconds for the exact part of a reading; beyond them pages that processes share count fully for each."""
_SLOW_READINGS: Final = 10
"""Every which reading looks at mappings, descriptors and locks, which take longest to read."""
_MAPPING: Final = 384
"""Bytes that the kernel keeps for each mapping of a process."""
_LOCK: Final = 256
"""Bytes that the kernel keeps for each lock on a part of a file."""
_FEW_DESCRIPTORS: Final = 512
_PIPE: Final = 65_536
_PIPES_IN_FULL: Final = 64 * 2**20
"""Bytes of a user's pipes beyond which the kernel gives each further pipe no more than `_SMALL_PIPE`."""
_SMALL_PIPE: Final = 8192


class Usage:
    """Reads one sandbox. Needs the rights of its user, or of root."""

    def __init__(self, pid: int, namespace: int, ceiling: int) -> None:
        """Prepare to read the sandbox whose first process is `pid`, in the process namespace with inode `namespace`.

        Below `ceiling` bytes an upper bound is as good as the exact sum, which takes longer to read.
        """
        self._pid, self._namespace, self._ceiling = pid, namespace, ceiling
        self._processes = -1
        self._folders: list[int] = []
        self._readings = 0
        self._slow_bytes = 0
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
                    return Used(self._memory(), self._num_files())
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
            for folder in _FOLDERS:
                found = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=root)
                opened.append(found)
        except OSError:
            for descriptor in opened:
                os.close(descriptor)
            return False
        os.close(root)
        self._processes, self._folders = processes, opened[2:]
        return True

    def _num_files(self) -> int:
        kept = (os.fstatvfs(folder) for folder in self._folders)
        return sum(found.f_files - found.f_ffree for found in kept)

    def _memory(self) -> int:
        pids = [name for name in os.listdir(self._processes) if name.isdecimal()]
        private = {pid: self._private(pid) for pid in pids}
        if self._readings % _SLOW_READINGS == 0:
            self._slow_bytes = self._mappings(pids) + self._pipes(pids) + self._locks()
        self._readings += 1
        tables = sum(tables for _, tables in private.values())
        others = tables + self._contents() + self._sockets() + self._slow_bytes
        pages = sum(pages for pages, _ in private.values())
        return others + (pages if others + pages <= self._ceiling else self._shares(private))

    def _private(self, pid: str) -> tuple[int, int]:
        """Return the bytes of a process's own pages, in memory or swapped out, and of its page tables."""
        lines = self._lines(f"{pid}/status")
        return _kibibytes(lines, b"RssAnon:", b"VmSwap:"), _kibibytes(lines, b"VmPTE:")

    def _shares(self, private: dict[str, tuple[int, int]]) -> int:
        """Return the pages of all processes, each page once, as far as the time for it suffices."""
        began_s = time.thread_time()
        total = 0
        for pid, (pages, _) in private.items():
            lines = self._lines(f"{pid}/smaps_rollup") if time.thread_time() - began_s < _CPU_S else []
            total += _kibibytes(lines, b"Pss_Anon:", b"SwapPss:") if lines else pages
        return total

    def _contents(self) -> int:
        kept = (os.fstatvfs(folder) for folder in self._folders)
        return sum((found.f_blocks - found.f_bfree) * found.f_frsize for found in kept)

    def _sockets(self) -> int:
        """Return a bound of what sockets hold: unix ones fill the buffer of the sender, the others say what they hold."""
        counts = {line.split()[0]: int(line.split()[2]) for line in self._lines("1/net/protocols")[1:]}
        total = (counts.get(b"UNIX", 0) + counts.get(b"UNIX-STREAM", 0)) * self._unix_socket
        for name, kind in ((b"TCP", "tcp"), (b"TCPv6", "tcp6"), (b"UDP", "udp"), (b"UDPv6", "udp6")):
            if counts.get(name, 0):
                total += sum(_queued(line) for line in self._lines(f"1/net/{kind}")[1:])
        return total

    def _mappings(self, pids: list[str]) -> int:
        began_s = time.thread_time()
        total = 0
        for pid in pids:
            for piece in self._pieces(f"{pid}/maps"):
                total += piece.count(b"\n") * _MAPPING
                if time.thread_time() - began_s > _CPU_S:
                    return total
        return total

    def _locks(self) -> int:
        return sum(piece.count(b"\n") for piece in self._pieces("locks")) * _LOCK

    def _pipes(self, pids: list[str]) -> int:
        """Return a bound of what pipes hold, where there are many descriptors."""
        many = 0
        for pid in pids:
            with suppress(OSError):
                many += os.stat(f"{pid}/fd", dir_fd=self._processes).st_size
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
            if time.thread_time() - began_s > _CPU_S:
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


def _queued(line: bytes) -> int:
    """Return a bound of what an internet socket holds: its record, and its queues with the overhead of small packets."""
    sent, _, received = line.split()[4].partition(b":")
    return 4096 + 2 * (int(sent, 16) + int(received, 16))


def _default_buffer() -> int:
    """Return the bytes that a unix socket may hold, on its way to others."""
    with suppress(OSError):
        return int(Path("/proc/sys/net/core/wmem_default").read_text())
    return 212_992  # the kernel's own; containers may not see the setting
