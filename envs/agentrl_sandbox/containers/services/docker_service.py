"""docker and podman, by their commands: a container with a supervisor as its first process, which no program can kill.

Invariant: images are never downloaded, a container has no capability, and no network unless one is named for it. It is
removed by its name. It needs the daemon on this machine, whose `/usr` it sees read-only for the Python of the supervisor.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Iterable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import Final, NamedTuple

import anyio.to_thread

from agentrl.errors import ConfigError, EnvironmentFault
from agentrl_sandbox.box import BOX_START_S, open_session
from agentrl_sandbox.bubblewrap.start import SUPERVISOR_FOLDER
from agentrl_sandbox.containers.protocol import CONTAINER_LIMITS, CONTAINER_VARIABLES
from agentrl_sandbox.containers.starter import HOST_FOLDER, WRAPPER, WRAPPER_TEXT
from agentrl_sandbox.docker import Docker, DockerStarter, check_docker, container_name, inside_words, walls
from agentrl_sandbox.session import Session
from agentrl_sandbox.types import Limits, Program

logger = logging.getLogger(__name__)
_READY: Final = 'echo ready >&2 && exec "$@"'


def container_arguments(
    docker: Docker,
    program: Program,
    limits: Limits,
    *,
    name: str,
    folder: str,
    environment: dict[str, str],
    network: str | None = None,
) -> list[str]:
    """Return the command that runs `program` as root in a container whose file system can be written."""
    mounts = {SUPERVISOR_FOLDER: f"{folder}/agentrl", f"{HOST_FOLDER}/usr": "/usr"}
    words = [*walls(docker, limits, name, network=network), "--user", "0:0"]
    words += inside_words(docker, mounts, {**environment, **program.environment})
    return [*words, "--entrypoint", "/bin/sh", docker.image, "-c", _READY, "sh", *program.argv]


class StartedEnvironment(NamedTuple):
    """An environment with a supervisor as its first process, which only limits end."""

    session: Session
    python: tuple[str, ...]
    """The words of a command that runs a Python in it."""


class DockerService:
    """Starts containers of a local daemon, or of podman.

    Args:
        name: of the command: docker or podman.
        command: its words.
        runtime: of the daemon, such as `runsc` for gVisor; None: its default.
    """

    def __init__(self, name: str, command: tuple[str, ...], runtime: str | None = None) -> None:
        self.name, self._command, self._runtime = name, command, runtime

    async def check(self, image: str) -> None:
        """Refuse a machine without the command, its daemon or the image, or one where that does not run.

        Raises:
            ConfigError: with the reason and the fix.
        """
        await self._check_there(image)
        try:
            async with self.start(image, CONTAINER_LIMITS, CONTAINER_VARIABLES) as place:
                done = await place.session.run(Program(argv=("/bin/bash", "-c", "echo $((6 * 7))")), timeout_s=BOX_START_S)
        except EnvironmentFault as fault:
            raise ConfigError(f"containers: {self.name} runs no container of {image}: {fault}{_hint(str(fault))}") from fault
        if done.stdout != b"42\n":
            raise ConfigError(f"containers: bash does not run in a container of {image}: {done.text}")

    async def missing(self, images: Iterable[str]) -> dict[str, ConfigError]:
        """Return why images are not there, by their names; each is named in a warning, as perhaps no task needs it."""
        found: dict[str, ConfigError] = {}
        for image in images:
            try:
                await self._check_there(image)
            except ConfigError as error:
                logger.warning("%s; tasks that need it fail", error)
                found[image] = error
        return found

    async def _check_there(self, image: str) -> None:
        docker = Docker(image=image, command=self._command)
        await anyio.to_thread.run_sync(partial(check_docker, docker, engine=self.name))

    @asynccontextmanager
    async def start(
        self, image: str, limits: Limits, environment: Mapping[str, str], network: str | None = None
    ) -> AsyncGenerator[StartedEnvironment]:
        """Start a container with a supervisor in a network of the engine, or in none; delete it at the block's end.

        Raises:
            EnvironmentFault: it does not start.
        """
        docker = Docker(image=image, command=self._command, runtime=self._runtime)
        words = partial(container_arguments, environment=dict(environment), network=network)
        # The folder of `/usr` must be there before it is mounted: the folder above is read-only.
        own = {"python": WRAPPER_TEXT.encode(), "host/usr/.keep": b""}
        name = container_name()
        supervisor = (WRAPPER, "-I", "-S", "-B", f"{SUPERVISOR_FOLDER}/supervisor.py")
        async with open_session(DockerStarter(docker, words, own, name), supervisor, limits) as session:
            yield StartedEnvironment(session, (*self._command, "exec", "--interactive", name, WRAPPER, "-I", "-S", "-B"))


def _hint(said: str) -> str:
    """Return what to do where the runtime of containers refuses this machine."""
    is_crun = "crun" in said or "hybrid" in said
    return "; another runtime may do it, such as `runtime: runc` in `containers`" if is_crun else ""
