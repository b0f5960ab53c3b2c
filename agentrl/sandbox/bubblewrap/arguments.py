"""The command line of bubblewrap.

Invariant: a program sees the system's libraries read-only, three directories in memory that are limited in size, and
nothing else of the machine.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from agentrl.sandbox.bubblewrap.host import Host
from agentrl.sandbox.types import MIB, Limits

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
    for path in (*_SETTINGS, *host.readable):
        if Path(path).exists():
            words += ["--ro-bind", path, path]
    words += ["--ro-bind-data", str(passwd), "/etc/passwd", "--dev", "/dev"]
    # It reads as /dev/zero does, and cannot be mapped: such a mapping is shared memory that no process shows.
    words += ["--dev-bind", "/dev/full", "/dev/zero"]
    # Terminals are of all the machine's processes together; /dev/ptmx is a link to one in this folder.
    words += ["--perms", "0555", "--size", "4096", "--tmpfs", "/dev/pts", "--remount-ro", "/dev/pts"]
    words += [*_in_memory("/dev/shm", limits.shared_mb), "--remount-ro", "/dev"]
    words += [*_in_memory(WORK, limits.work_mb), *_in_memory("/tmp", limits.temp_mb)]
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


def _in_memory(path: str, mebibytes: int) -> list[str]:
    return ["--perms", "0700" if path == WORK else "1777", "--size", str(math.ceil(mebibytes * MIB)), "--tmpfs", path]


def _parents(path: str) -> list[str]:
    return [str(parent) for parent in Path(path).parents if str(parent) not in ("/", WORK, "/run")]
