"""The choice of containers in a run file: `workflow_args.containers` of the terminal workflows.

Invariant: a backend that cannot be had is an error; no other takes its place.
"""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Literal, Self

from pydantic import Field, ValidationError, model_validator

from agentrl.config.base import Config
from agentrl.errors import ConfigError
from agentrl.sandbox.containers.protocol import MAX_STARTING, Containers
from agentrl.sandbox.containers.workbench import open_containers
from agentrl.sandbox.types import Limits


class ContainersConfig(Config):
    """Where containers run."""

    backend: Literal["bubblewrap", "hosts"] = "bubblewrap"
    """`bubblewrap` is this machine, `hosts` others; the rest are services by their command or API."""
    hosts: tuple[str, ...] = ()
    """hosts: addresses of `agentrl sandbox-host`, such as `http://10.0.0.7:8710`."""
    api_key_env: str | None = None
    """hosts, e2b: the environment variable that holds the key."""
    max_starting: int = Field(default=MAX_STARTING, ge=1)
    """Environments that start at a time; running ones do not count."""

    @model_validator(mode="before")
    @classmethod
    def _hosts_name_their_backend(cls, given: object) -> object:
        if isinstance(given, dict) and given.get("hosts") and "backend" not in given:  # pyright: ignore[reportUnknownMemberType]
            return {**given, "backend": "hosts"}  # pyright: ignore[reportUnknownVariableType]
        return given  # pyright: ignore[reportUnknownVariableType]

    @model_validator(mode="after")
    def _check_hosts(self) -> Self:
        if (self.backend == "hosts") != bool(self.hosts):
            raise ValueError(f"hosts: expected addresses with the backend hosts and none with others, got {self.hosts!r}")
        return self

    def key(self) -> str | None:
        """Return the key; a variable that is not set is a ConfigError."""
        key = None if self.api_key_env is None else os.environ.get(self.api_key_env)
        if self.api_key_env is not None and not key:
            raise ConfigError(f"containers.api_key_env: the environment variable {self.api_key_env} is not set")
        return key


def read_containers_config(given: Mapping[str, object] | None) -> ContainersConfig:
    """Return the choice in `workflow_args.containers`; None: bubblewrap on this machine.

    Example:
        >>> read_containers_config({"hosts": ["http://10.0.0.7:8710"]}).backend
        'hosts'
    """
    try:
        return ContainersConfig.model_validate(given or {})
    except ValidationError as error:
        raise ConfigError(f"containers: {error}") from None


@asynccontextmanager
async def open_chosen_containers(
    config: ContainersConfig, *, images: Mapping[str, str | None], limits: Limits, max_open: int
) -> AsyncGenerator[Containers]:
    """Open the containers that `config` names.

    Raises:
        ConfigError: they cannot be had; the message has the reason and the fix.
    """
    async with AsyncExitStack() as stack:
        if config.backend == "hosts":
            from agentrl.sandbox.containers.fleet.fleet import open_fleet  # aiohttp takes a while to import

            opened = open_fleet(
                config.hosts,
                api_key=config.key(),
                images=images,
                limits=limits,
                max_open=max_open,
                max_starting=config.max_starting,
            )
            yield await stack.enter_async_context(opened)
            return
        own = open_containers(images=images, limits=limits, max_open=max_open, max_starting=config.max_starting)
        yield await stack.enter_async_context(own)
