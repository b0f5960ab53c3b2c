"""Which addresses only this machine can reach.

Invariant: no name is looked up.
"""

from __future__ import annotations

import ipaddress


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
