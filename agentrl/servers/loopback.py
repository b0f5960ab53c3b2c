"""Whether a request names this machine: a host name of another site may lead here too (DNS rebinding)."""

from __future__ import annotations

from urllib.parse import urlsplit

from agentrl.processes.machine import is_loopback


def names_loopback(host: str) -> bool:
    """Return whether a `Host` header, such as `127.0.0.1:30000`, names this machine's loopback.

    Example:
        >>> names_loopback("localhost:8000"), names_loopback("[::1]:8000"), names_loopback("rebound.example:8000")
        (True, True, False)
    """
    try:
        return is_loopback(urlsplit(f"//{host}").hostname or "")
    except ValueError:
        return False
