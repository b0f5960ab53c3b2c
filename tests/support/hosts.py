"""Hosts of containers for tests: processes of this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager

HOST_KEY = "a key for hosts"


@contextmanager
def running_host(*options: str) -> Generator[tuple[str, subprocess.Popen[bytes]]]:
    """Yield the address of a host, and its process, which the block's end kills."""
    command = [sys.executable, "-m", "agentrl", "sandbox-host", "--port", "0", "--api-key-env", "HOST_KEY", *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, "HOST_KEY": HOST_KEY})
    try:
        assert process.stdout is not None
        yield json.loads(process.stdout.readline())["url"], process
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()
