"""Free ports and network interfaces of this machine.

Invariant: nothing stays open.
"""

from __future__ import annotations

import fcntl
import socket
import struct
from contextlib import suppress

_SIOCGIFADDR = 0x8915
"""The request of ioctl(2) for the IPv4 address of an interface."""


def free_port(host: str) -> int:
    """Return a port of `host` that is free at this moment."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as probe:
        return int(probe.getsockname()[1])


def interface_of(address: str) -> str | None:
    """Return the name of the network interface that has an IPv4 address; None where no interface has it.

    Example:
        >>> interface_of("127.0.0.1"), interface_of("192.0.2.1")
        ('lo', None)
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # an interface without an IPv4 address
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    return None
