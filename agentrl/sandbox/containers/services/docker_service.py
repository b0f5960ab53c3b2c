"""docker and podman, by their commands: a container with a supervisor as its first process, which no program can kill.

Invariant: images are never downloaded, a container has no network and no capability, and it is removed by its name. It needs
the daemon on this machine, whose `/usr` it sees read-only for the Python of the supervisor.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from functools import partial

from agentrl.sandbox.box import open_session
from agentrl.sandbox.bubblewrap.start import SUPERVISOR_FOLDER
from agentrl.sandbox.containers.services.copied import StartedEnvironment, WantedEnvironment
from agentrl.sandbox.containers.services.relayed_port import BytePipe
from agentrl.sandbox.containers.starter import HOST_FOLDER, WRAPPER, WRAPPER_TEXT
from agentrl.sandbox.docker import Docker, DockerStarter, check_docker, container_name, docker_variables
from agentrl.sandbox.pipes import process_pipe
from agentrl.sandbox.types import Limits, Program

_READY = 'echo ready >&2 && exec "$@"'


def container_arguments(
    docker: Docker, program: Program, limits: Limits, *, name: str, folder: str, environment: dict[str, str]
) -> list[str]:
    """Return the command that runs `program` as root in a container whose file system can be written."""
    words = [*docker.command, "run", "--rm", "--interactive", "--pull", "never", "--name", name, "--network", "none"]
    words += ["--cap-drop", "ALL", "--security-opt", "no-new-privileges", "--user", "0:0", "--workdir", "/"]
    words += ["--memory", f"{limits.memory_mb}m", "--memory-swap", f"{limits.memory_mb}m"]
    words += ["--pids-limit", str(limits.processes), "--ulimit", f"nofile={limits.open_files}:{limits.open_files}"]
    words += ["--ulimit", "core=0:0", "--shm-size", f"{limits.shared_mb}m", "--hostname", "sandbox", "--log-driver", "none"]
    mounts = {SUPERVISOR_FOLDER: f"{folder}/agentrl", f"{HOST_FOLDER}/usr": "/usr"}
    for inner, outer in mounts.items():
        words += ["--mount", f"type=bind,source={outer},target={inner},readonly"]
    for key, value in {**environment, **program.environment}.items():
        words += ["--env", f"{key}={value}"]
    if docker.runtime is not None:
        words += ["--runtime", docker.runtime]
    return [*words, "--entrypoint", "/bin/sh", docker.image, "-c", _READY, "sh", *program.argv]


class DockerService:
    """Starts containers of a local daemon, or of podman.

    Args:
        name: of the command: docker or podman.
        command: its words.
        runtime: of the daemon, such as `runsc` for gVisor; None: its default.
    """

    def __init__(self, name: str, command: tuple[str, ...], runtime: str | None = None) -> None:
        self.name, self._command, self._runtime = name, command, runtime

    def check(self, image: str) -> None:
        """Refuse a machine without the command, its daemon or the image; the ConfigError has the fix."""
        check_docker(Docker(image=image, command=self._command))

    @asynccontextmanager
    async def start(self, wanted: WantedEnvironment) -> AsyncGenerator[StartedEnvironment]:
        """Start a container as `Service.start` describes."""
        docker = Docker(image=wanted.image, command=self._command, runtime=self._runtime)
        words = partial(container_arguments, environment=dict(wanted.environment))
        # The folder of `/usr` must be there before it is mounted: the folder above is read-only.
        own = {"python": WRAPPER_TEXT.encode(), "host/usr/.keep": b""}
        name = container_name()
        supervisor = (WRAPPER, "-I", "-S", "-B", f"{SUPERVISOR_FOLDER}/supervisor.py")
        async with open_session(DockerStarter(docker, words, own, name), supervisor, wanted.limits) as session:
            yield StartedEnvironment(session, _ended_by_its_programs, partial(self._run_python, name))

    @asynccontextmanager
    async def _run_python(self, name: str, program: str, arguments: tuple[str, ...]) -> AsyncGenerator[BytePipe]:
        words = [*self._command, "exec", "--interactive", name, WRAPPER, "-I", "-S", "-B", "-c", program, *arguments]
        async with process_pipe(words, environment=docker_variables()) as pipe:
            yield pipe


async def _ended_by_its_programs() -> bool:
    """Return that only programs and limits end the first process of a container of this machine."""
    return True
