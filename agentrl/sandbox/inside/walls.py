"""The walls around one program of a warm start: namespaces, directories, no rights, the filter of system calls.

Invariant: a wall that cannot be put up is an OSError, and no program starts behind the others.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import struct

_NEW_NAMESPACES = 0x20000000 | 0x00020000 | 0x08000000 | 0x40000000
"""Processes, mounts, System V IPC and message queues, network."""
_NOSUID_NODEV, _NOEXEC, _READ_ONLY, _BIND, _REMOUNT = 2 | 4, 8, 1, 4096, 32
_SET_DUMPABLE, _SET_SECCOMP, _DROP_BOUNDING, _SET_NO_NEW_PRIVILEGES, _AMBIENT = 4, 22, 24, 38, 47
_CLEAR_ALL, _FILTER_MODE = 4, 2
_CAPABILITIES_VERSION = 0x20080522
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 1

_libc = ctypes.CDLL(None, use_errno=True)


def _succeeded(result: int, said: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{said}: {os.strerror(number)}")
    return result


def _prctl(option: int, *words: int) -> None:
    padded = [ctypes.c_ulong(word) for word in (*words, 0, 0, 0, 0)[:4]]
    _succeeded(_libc.prctl(option, *padded), f"prctl({option})")


def _mount(source: str, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    words = [word if word is None else word.encode() for word in (source, target, kind)]
    data = None if options is None else options.encode()
    _succeeded(_libc.mount(*words, ctypes.c_ulong(flags), data), f"mount {target}")


def enter_namespaces() -> None:
    """Give this process, and the processes that it forks, namespaces of their own; the next fork is the first process."""
    _succeeded(_libc.unshare(_NEW_NAMESPACES), "unshare")


def furnish(sizes: dict[str, int], num_files: int) -> None:
    """Give this mount namespace empty directories, the `/proc` of its processes, and a loopback.

    Args:
        sizes: bytes by directory; the first is for this user alone.
        num_files: files and directories in each.
    """
    mode = "0700"
    for path, size in sizes.items():
        _mount("tmpfs", path, "tmpfs", _NOSUID_NODEV, f"size={size},nr_inodes={num_files},mode={mode}")
        mode = "1777"
    _mount("proc", "/proc", "proc", _NOSUID_NODEV | _NOEXEC)
    _mount("/dev/null", "/proc/cmdline", None, _BIND)
    _mount("/proc/sys", "/proc/sys", None, _BIND)
    _mount("/proc/sys", "/proc/sys", None, _BIND | _REMOUNT | _READ_ONLY | _NOSUID_NODEV | _NOEXEC)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as made:
        request = struct.pack("16sH22x", b"lo", 0)
        _, flags = struct.unpack_from("16sH", fcntl.ioctl(made, _SIOCGIFFLAGS, request))
        fcntl.ioctl(made, _SIOCSIFFLAGS, struct.pack("16sH22x", b"lo", flags | _IFF_UP))


def give_up_rights(seccomp: bytes) -> None:
    """Drop every capability for good, and put this process under the filter `seccomp`, an array of `sock_filter`."""
    _prctl(_SET_NO_NEW_PRIVILEGES, 1)
    with open("/proc/sys/kernel/cap_last_cap") as file:
        last = int(file.read())
    _prctl(_AMBIENT, _CLEAR_ALL)
    for capability in range(last + 1):
        _prctl(_DROP_BOUNDING, capability)
    header, nothing = struct.pack("=Ii", _CAPABILITIES_VERSION, 0), bytes(24)
    _succeeded(_libc.capset(header, nothing), "capset")
    _prctl(_SET_DUMPABLE, 1)
    code = ctypes.create_string_buffer(seccomp, len(seccomp))
    program = struct.pack("@HP", len(seccomp) // 8, ctypes.addressof(code))
    held = ctypes.create_string_buffer(program, len(program))
    _prctl(_SET_SECCOMP, _FILTER_MODE, ctypes.addressof(held))
