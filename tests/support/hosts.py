"""Hosts of containers for tests: processes of this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Generator
from contextlib import AbstractAsyncContextManager, contextmanager
from typing import Any

from agentrl_sandbox.base import Sandbox
from agentrl_sandbox.hosts.server import HostOptions, serving_host

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


def serving_sandbox(
    sandbox: Sandbox,
    *,
    host: str = "127.0.0.1",
    api_key: str | None = None,
    **options: Any,  # noqa: ANN401
) -> AbstractAsyncContextManager[str]:
    """Serve a sandbox by a host without containers that has these options."""
    return serving_host(HostOptions(**options), sandbox=sandbox, host=host, api_key=api_key)
