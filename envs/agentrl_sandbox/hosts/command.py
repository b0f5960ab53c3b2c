"""`agentrl sandbox-host`: gives containers of this machine to runs on others.

Invariant: a signal ends the host with every container that it has; it listens off loopback only with a key.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence

import anyio
import msgspec

from agentrl.errors import ConfigError
from agentrl.servers.listening import check_address
from agentrl_sandbox.containers import open_containers
from agentrl_sandbox.containers.protocol import MAX_STARTING
from agentrl_sandbox.hosts.container_server import HostOptions, free_memory_mb, serving_containers
from agentrl_sandbox.hosts.sandbox_server import MAX_LIMITS
from agentrl_sandbox.types import Limits

_OWN_SHARE = 0.8
"""Share of the free memory that a host gives without `--memory-mb`."""


def sandbox_host_command(
    *,
    host: str = "127.0.0.1",
    port: int = 8710,
    api_key_env: str | None = None,
    image: tuple[str, ...] = (),
    max_open: int = 64,
    max_starting: int = MAX_STARTING,
    memory_mb: int | None = None,
    share: float = 0.25,
) -> None:
    """Give containers of this machine to runs on others, which name it under workflow_args.containers.

    Args:
        host: Address to listen on; anything but loopback needs --api-key-env.
        port: Port to listen on; 0 picks a free one.
        api_key_env: Environment variable with the key that runs must send.
        image: An image as NAME=FOLDER, the folder that it was unpacked into; may be repeated. NAME can be "*".
        max_open: Environments at a time; further ones wait, or go to another host.
        max_starting: Environments that start at a time; running ones do not count.
        memory_mb: Memory for all environments, in MiB; the default is four fifths of what is free now.
        share: The part of its memory limit for which an environment counts; 1 promises no memory twice.
    """
    key = None if api_key_env is None else os.environ.get(api_key_env)
    if api_key_env is not None and not key:
        raise ConfigError(f"--api-key-env {api_key_env}: this environment variable is not set; export it, or drop the flag")
    if max_open < 1 or max_starting < 1 or not 0 < share <= 1:
        raise ConfigError(
            f"expected --max-open and --max-starting of at least 1 and a --share above 0 and up to 1, got {max_open}, "
            f"{max_starting} and {share}"
        )
    check_address(host, key)
    memory_mb = int(free_memory_mb() * _OWN_SHARE) if memory_mb is None else memory_mb
    options = HostOptions(max_open=max_open, memory_mb=memory_mb, share=share, maxima=_maxima(memory_mb))
    anyio.run(_give_containers, host, port, key, _images(image), max_starting, options)


def _maxima(memory_mb: int) -> Limits:
    """Return the most that one environment may ask for: as much as all of them together have."""
    return MAX_LIMITS.model_copy(update={"wall_s": 86_400.0, "memory_mb": max(32, memory_mb)})


def _images(given: Sequence[str]) -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for option in given:
        name, equals, folder = option.rpartition("=")
        if not equals or not name or not folder:
            raise ConfigError(f"--image {option}: expected NAME=FOLDER, such as debian:12=/srv/images/debian-12")
        found[name] = folder
    return found


async def _give_containers(
    host: str, port: int, key: str | None, images: dict[str, str | None], max_starting: int, options: HostOptions
) -> None:
    with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        async with (
            open_containers(images=images, max_open=options.max_open, max_starting=max_starting) as containers,
            serving_containers(containers, options, images=tuple(images), host=host, port=port, api_key=key) as url,
        ):
            ready = {"event": "ready", "url": url, "memory_mb": options.memory_mb, "max_open": options.max_open}
            sys.stdout.write(f"{msgspec.json.encode(ready).decode()}\n")
            sys.stdout.flush()
            async for _ in signals:
                return
