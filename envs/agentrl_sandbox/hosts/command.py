"""`agentrl sandbox-host`: runs programs and gives containers of this machine to runs on others.

Invariant: a signal ends the host with everything that it has; it listens off loopback only with a key.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from functools import partial
from pathlib import Path

import anyio
import msgspec
from pydantic import ValidationError

from agentrl.errors import ConfigError
from agentrl.servers.listening import check_address
from agentrl_sandbox.base import Sandbox
from agentrl_sandbox.config import SandboxConfig, open_sandbox
from agentrl_sandbox.containers import Containers, open_containers
from agentrl_sandbox.containers.protocol import MAX_STARTING
from agentrl_sandbox.containers.roots import folder_root
from agentrl_sandbox.hosts.server import MAX_LIMITS, MAX_SESSIONS, HostOptions, free_memory_mb, serving_host
from agentrl_sandbox.types import Limits

_OWN_SHARE = 0.8
"""Share of the free memory that a host gives without `--memory-mb`."""


def sandbox_host_command(
    *,
    host: str = "127.0.0.1",
    port: int | None = None,
    api_key_env: str | None = None,
    image: tuple[str, ...] = (),
    max_open: int = 64,
    max_starting: int = MAX_STARTING,
    memory_mb: int | None = None,
    share: float = 0.25,
    max_running: int | None = None,
    max_sessions: int = MAX_SESSIONS,
    max: tuple[str, ...] = (),
    containers: bool = True,
) -> None:
    """Run programs and containers of runs on other machines, which name this one (sandbox.url, containers.hosts).

    Args:
        host: Address to listen on; anything but loopback needs --api-key-env.
        port: Port to listen on, 8710 by default; 0 picks a free one.
        api_key_env: Environment variable with the key that runs must send.
        image: An image as NAME=FOLDER, the folder that it was unpacked into; may be repeated. NAME can be "*".
        max_open: Environments at a time; further ones wait, or go to another host.
        max_starting: Environments that start at a time; running ones do not count.
        memory_mb: Memory for all environments, in MiB; the default is four fifths of what is free now.
        share: The part of its memory limit for which an environment counts; 1 promises no memory twice.
        max_running: Programs at a time that need no environment; the default is one for each core.
        max_sessions: Sessions at a time that need no environment.
        max: The most that a run may ask for, as LIMIT=NUMBER, such as wall_s=600; may be repeated.
        containers: Whether to give containers; without them a host needs less of its kernel.
    """
    key = None if api_key_env is None else os.environ.get(api_key_env)
    if api_key_env is not None and not key:
        raise ConfigError(f"--api-key-env {api_key_env}: this environment variable is not set; export it, or drop the flag")
    check_address(host, key)
    if max_open < 1 or max_starting < 1 or not 0 < share <= 1:
        raise ConfigError(
            f"expected --max-open and --max-starting of at least 1 and a --share above 0 and up to 1, got {max_open}, "
            f"{max_starting} and {share}"
        )
    memory_mb = int(free_memory_mb() * _OWN_SHARE) if memory_mb is None else memory_mb
    # One environment may ask for as much as all of them together have.
    most = {"wall_s": 86_400.0, "memory_mb": memory_mb if memory_mb > 32 else 32} if containers else {}
    options = HostOptions(
        max_open=max_open,
        memory_mb=memory_mb,
        share=share,
        max_sessions=max_sessions,
        maxima=_maxima(max, MAX_LIMITS.model_copy(update=most)),
    )
    programs = SandboxConfig(max_running=max_running, max_sessions=max_sessions)
    opened = open_containers(images=_images(image), max_open=max_open, max_starting=max_starting)
    port = 8710 if port is None else port
    serving = partial(serving_host, options, images=tuple(_images(image)), host=host, port=port, api_key=key)
    ready = {"memory_mb": memory_mb, "max_open": max_open} if containers else {}
    anyio.run(_serve, serving, programs, opened if containers else None, ready)


def _maxima(given: Sequence[str], most: Limits) -> Limits:
    """Return `most` with the values of `--max`; a `ConfigError` for an option that is not `LIMIT=NUMBER`."""
    chosen: dict[str, object] = dict(most)
    for option in given:
        name, equals, value = option.partition("=")
        if not equals or name not in chosen:
            raise ConfigError(f"--max {option}: expected LIMIT=NUMBER, where LIMIT is one of {', '.join(chosen)}")
        chosen[name] = value
    try:
        return Limits.model_validate(chosen)
    except ValidationError as error:
        raise ConfigError(f"--max: {error}") from None


def _images(given: Sequence[str]) -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for option in given:
        name, equals, folder = option.rpartition("=")
        if not equals or not name or not folder:
            raise ConfigError(f"--image {option}: expected NAME=FOLDER, such as debian:12=/srv/images/debian-12")
        folder_root(Path(folder))  # a host offers no image that it lacks
        found[name] = folder
    return found


async def _serve(
    serving: Callable[..., AbstractAsyncContextManager[str]],
    programs: SandboxConfig,
    opened: AbstractAsyncContextManager[Containers] | None,
    ready: Mapping[str, object],
) -> None:
    async with AsyncExitStack() as stack:
        signals = stack.enter_context(anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT))
        containers = None if opened is None else await stack.enter_async_context(opened)
        sandbox: Sandbox | None = None
        try:
            sandbox = await stack.enter_async_context(open_sandbox(programs))
        except ConfigError as error:
            if containers is None:
                raise
            sys.stderr.write(f"warning: this host gives containers and runs no other programs: {error}\n")
        url = await stack.enter_async_context(serving(sandbox=sandbox, containers=containers))
        sys.stdout.write(f"{msgspec.json.encode({'event': 'ready', 'url': url, **ready}).decode()}\n")
        sys.stdout.flush()
        async for _ in signals:
            return
