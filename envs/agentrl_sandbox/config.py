"""The choice of a sandbox in a run file.

Invariant: a sandbox that cannot be had is an error; no other takes its place.
"""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Literal, Self

from pydantic import Field, model_validator

from agentrl.config.base import Config
from agentrl.errors import ConfigError
from agentrl_sandbox.base import Sandbox, SandboxPool
from agentrl_sandbox.bubblewrap import open_bubblewrap
from agentrl_sandbox.docker import Docker, open_docker
from agentrl_sandbox.types import Limits
from agentrl_sandbox.unsafe import open_unsafe_process


class SandboxConfig(Config):
    """Where programs that a model wrote run, and what they may use."""

    backend: Literal["bubblewrap", "docker", "remote", "unsafe_process"] = "bubblewrap"
    """`unsafe_process` isolates nothing."""
    limits: Limits = Limits()
    """Of each program and session that brings none of its own."""
    max_running: int | None = Field(default=None, ge=1)
    """Programs at a time; None: one for each core."""
    max_sessions: int = Field(default=64, ge=1)
    """Sessions at a time."""
    python: str | None = None
    """bubblewrap: path of the sandbox's Python; None: the system's. One outside `/usr` needs its tree in `readable`."""
    readable: tuple[str, ...] = ()
    """bubblewrap: further directories and files that programs may read."""

    image: str = "python:3.11-slim"
    """docker: an image of this machine with `python3`, and bash for the shells of sessions. It is not downloaded."""
    url: str | None = None
    """remote: address of `agentrl sandbox-host` on another machine, such as `http://10.0.0.7:8710`."""
    api_key_env: str | None = None
    """remote: the environment variable that holds the server's key."""

    @model_validator(mode="after")
    def _check_remote(self) -> Self:
        if (self.backend == "remote") != (self.url is not None):
            raise ValueError(f"sandbox.url: expected one with the backend remote and none with others, got {self.url!r}")
        return self


@asynccontextmanager
async def open_sandbox(config: SandboxConfig | None = None) -> AsyncGenerator[SandboxPool]:
    """Open the sandbox that `config` names and yield it, bounded; None: bubblewrap.

    Raises:
        ConfigError: it cannot be had on this machine; the message has the reason and the fix.
    """
    config = config or SandboxConfig()
    async with AsyncExitStack() as stack:
        sandbox = await _open(config, stack)
        yield SandboxPool(sandbox, max_running=config.max_running, max_sessions=config.max_sessions)


async def _open(config: SandboxConfig, stack: AsyncExitStack) -> Sandbox:
    if config.backend == "unsafe_process":
        return open_unsafe_process(limits=config.limits)
    if config.backend == "docker":
        return await open_docker(Docker(image=config.image), limits=config.limits)
    if config.backend == "remote":
        from agentrl_sandbox.remote import open_remote  # aiohttp takes a while to import

        key = None if config.api_key_env is None else os.environ.get(config.api_key_env)
        if config.api_key_env is not None and not key:
            raise ConfigError(f"sandbox.api_key_env: the environment variable {config.api_key_env} is not set")
        assert config.url is not None
        return await stack.enter_async_context(open_remote(config.url, api_key=key, limits=config.limits))
    return await open_bubblewrap(limits=config.limits, python=config.python, readable=config.readable)
