"""The choice of containers in a run file: `workflow_args.containers` of the terminal workflows.

Invariant: a backend that cannot be had is an error; no other takes its place.
"""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Final, Literal, Self

from pydantic import Field, ValidationError, model_validator

from agentrl.config.base import Config
from agentrl.errors import ConfigError
from agentrl.processes.config import ClusterConfig
from agentrl.support.concurrency import task_group
from agentrl_sandbox.containers.image_facts import ENGINES
from agentrl_sandbox.containers.protocol import ANY_IMAGE, MAX_STARTING, Containers
from agentrl_sandbox.containers.services.copied import CopiedContainers
from agentrl_sandbox.containers.services.docker_service import DockerService
from agentrl_sandbox.containers.workbench import open_containers
from agentrl_sandbox.types import Limits

_OF_ENGINES: Final = frozenset({"agent_network", "build", "build_network", "build_s", "max_building"})
_REMOVED: Final = ("kubernetes", "e2b")
_INSTEAD: Final = (
    "Use `hosts`: run `agentrl sandbox-host` on other machines, pods of a cluster included; or docker or podman on this one "
    "(docs/howto/fleet.md, docs/adr/0043-engines-that-ran.md)"
)


class ContainersConfig(Config):
    """Where containers run."""

    backend: Literal["bubblewrap", "hosts", "ray", "docker", "podman"] = "bubblewrap"
    """`bubblewrap`: this machine. `hosts`: others. `ray`: the nodes of a cluster. The rest are engines of this machine."""
    hosts: tuple[str, ...] = ()
    """hosts: addresses of `agentrl sandbox-host`, such as `http://10.0.0.7:8710`."""
    address: str | None = None
    """ray: of the cluster, such as `10.0.0.1:6379`; None: the one that this process has joined, else $RAY_ADDRESS."""
    nodes: int | None = Field(default=None, ge=1)
    """ray: how many nodes hold containers; None: all that are there at the start."""
    api_key_env: str | None = None
    """hosts: the environment variable that holds the key."""
    image: str | None = None
    """docker, podman: the image of tasks that name none."""
    command: tuple[str, ...] | None = None
    """docker, podman: the words of their command, such as `[podman, --root, /srv/podman]`, with absolute paths; None: its
    name alone."""
    runtime: str | None = None
    """docker, podman: the runtime of containers, such as `runsc` for gVisor; None: the engine's default."""
    build: Literal["engine", "steps"] | None = None
    """docker, podman: who makes the image of a task from its Dockerfile: the `engine`, which builds whatever it can; or
    `steps`, in containers without a network, as with the other backends. None: the engine, unless `has_packages` is set."""
    build_network: str | None = None
    """docker, podman: the network of builds, such as `none` or `host`; None: the engine's default."""
    agent_network: str | None = None
    """docker, podman: the engine's network that agents of tasks join which permit it (`network_mode: public`), such as
    `bridge`; their tests join none. None: no container has a network. `host` is refused: it holds this machine's servers."""
    build_s: float | None = Field(default=None, gt=0)
    """docker, podman: seconds that a build has; None: the `environment.build_timeout_sec` of its task, which is 600 there
    by default."""
    max_building: int = Field(default=2, ge=1)
    """docker, podman: builds at a time."""
    max_starting: int = Field(default=MAX_STARTING, ge=1)
    """Environments that start at a time; running ones do not count."""

    @model_validator(mode="before")
    @classmethod
    def _hosts_name_their_backend(cls, given: object) -> object:
        if isinstance(given, dict) and given.get("backend") in _REMOVED:  # pyright: ignore[reportUnknownMemberType]
            raise ValueError(f"backend: {given['backend']} is gone. {_INSTEAD}")
        if isinstance(given, dict) and given.get("hosts") and "backend" not in given:  # pyright: ignore[reportUnknownMemberType]
            return {**given, "backend": "hosts"}  # pyright: ignore[reportUnknownVariableType]
        return given  # pyright: ignore[reportUnknownVariableType]

    @model_validator(mode="after")
    def _check_hosts(self) -> Self:
        if (self.backend == "hosts") != bool(self.hosts):
            raise ValueError(f"hosts: expected addresses with the backend hosts and none with others, got {self.hosts!r}")
        if self.backend != "ray" and (self.nodes is not None or self.address is not None):
            raise ValueError(f"nodes and address: the backend {self.backend} has none; they are for the backend ray")
        is_engine = self.backend in ENGINES
        if self.image is None and is_engine:
            raise ValueError(f"image: the backend {self.backend} needs one for tasks that name none")
        if not is_engine and (given := sorted(_OF_ENGINES & self.model_fields_set)):
            raise ValueError(f"{given[0]}: {self.backend} builds no images and has no networks; take docker or podman")
        if self.agent_network is not None and (self.agent_network == "host" or ":" in self.agent_network):
            raise ValueError(
                f"agent_network: expected a network such as bridge, got {self.agent_network!r}, in which agents would reach "
                "the servers of this machine or of another container"
            )
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
async def containers_of(
    config: ContainersConfig, *, images: Mapping[str, str | None], limits: Limits, max_open: int
) -> AsyncGenerator[Containers]:
    """Open the containers that `config` names.

    Raises:
        ConfigError: they cannot be had; the message has the reason and the fix.
    """
    async with AsyncExitStack() as stack:
        if config.backend == "bubblewrap":
            own = open_containers(images=images, limits=limits, max_open=max_open, max_starting=config.max_starting)
            yield await stack.enter_async_context(own)
        elif config.backend in ("hosts", "ray"):
            from agentrl_sandbox.containers.fleet.fleet import open_fleet  # aiohttp takes a while to import
            from agentrl_sandbox.containers.fleet.ray_hosts import open_ray_fleet

            connect = partial(open_fleet, images=images, limits=limits, max_open=max_open, max_starting=config.max_starting)
            cluster = ClusterConfig(launcher="ray", address=config.address)
            yield await stack.enter_async_context(
                open_ray_fleet(cluster, connect, nodes=config.nodes, images=images)
                if config.backend == "ray"
                else connect(config.hosts, api_key=config.key())
            )
        else:
            assert config.image is not None
            from agentrl_sandbox.containers.services.building import ImageBuilder

            engine = DockerService(config.backend, config.command or (config.backend,), config.runtime)
            named = {name if given is None else given for name, given in images.items()} - {ANY_IMAGE}
            await engine.check(config.image)
            missing = await engine.missing(sorted(named - {config.image}))
            builds = await stack.enter_async_context(task_group())
            stack.callback(builds.cancel_scope.cancel)
            builder = ImageBuilder(
                config.backend,
                config.command or (config.backend,),
                builds,
                images=images,
                missing=missing,
                runtime=config.runtime,
                network=config.build_network,
                max_building=config.max_building,
                build_s=config.build_s,
            )
            yield CopiedContainers(
                engine,
                images,
                default=config.image,
                missing=missing,
                limits=limits,
                max_open=max_open,
                max_starting=config.max_starting,
                builder=builder,
            )
