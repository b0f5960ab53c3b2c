"""Facts about this machine: its cores, memory, ports and network interfaces, and whether one of its processes works.

Invariant: no name is looked up, and nothing stays open.
"""

from __future__ import annotations

import fcntl
import ipaddress
import os
import socket
import struct
from contextlib import suppress
from pathlib import Path

LOOPBACK = "127.0.0.1"
_SIOCGIFADDR = 0x8915
"""The request of ioctl(2) for the IPv4 address of an interface."""
_CGROUP = Path("/sys/fs/cgroup")
_STATE, _USER_TICKS, _SYSTEM_TICKS = 0, 11, 12
"""Fields of /proc/PID/stat after the name of the program."""


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach `host`; a name other than localhost counts as reachable.

    Example:
        >>> is_loopback("127.0.0.1"), is_loopback("localhost"), is_loopback("10.0.0.1")
        (True, True, False)
    """
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def count_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def free_port(host: str) -> int:
    """Return a port of `host` that is free at this moment."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as probe:
        return int(probe.getsockname()[1])


def interface_of(address: str) -> str | None:
    """Return the name of the network interface that has an IPv4 address; None where no interface has it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # an interface without an IPv4 address
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    return None


def free_memory() -> int | None:
    """Return the bytes that this machine and this process's container can still give; None where the system does not tell.

    File pages that the kernel can drop count as free.
    """
    found: list[int] = []
    with suppress(OSError, IndexError, ValueError):
        text = Path("/proc/meminfo").read_text()
        found.append(int(text.partition("MemAvailable:")[2].split()[0]) << 10)
    with suppress(OSError, IndexError, ValueError):  # no limit, or no cgroups of version 2
        dropped = int((_CGROUP / "memory.stat").read_text().partition("\ninactive_file ")[2].split()[0])
        used = int((_CGROUP / "memory.current").read_text()) - dropped
        found.append(int((_CGROUP / "memory.max").read_text()) - used)
    return min(found, default=None)


def pulse(pid: int) -> int | None:
    """Return a number that grows while a process of this machine works; None: it is stopped, or cannot be seen.

    A process that holds the interpreter while it reads or writes a file sends no heartbeat, and is no dead one.
    """
    with suppress(OSError, ValueError, IndexError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        if fields[_STATE] not in "TtZX":
            return int(fields[_USER_TICKS]) + int(fields[_SYSTEM_TICKS]) + _bytes_moved(pid)
    return None


def _bytes_moved(pid: int) -> int:
    with suppress(OSError, ValueError):
        lines = (line.split(": ") for line in Path(f"/proc/{pid}/io").read_text().splitlines())
        return sum(int(number) for name, number in lines if name in ("rchar", "wchar", "read_bytes", "write_bytes"))
    return 0
