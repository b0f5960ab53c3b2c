"""Ports of this machine for a listener that starts later."""

from __future__ import annotations

import itertools
import os
import socket

FIRST, EACH = 20_000, 1_000
"""The first port, and how many each process of pytest-xdist has. They lie below those that a system gives to connections, so
no other program takes one before the listener starts."""
_numbers = itertools.count()


def later_port() -> int:
    """Return a port of 127.0.0.1 that is free and that no other test gets."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    while True:
        port = FIRST + worker * EACH + next(_numbers) % EACH
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) != 0:
                return port
