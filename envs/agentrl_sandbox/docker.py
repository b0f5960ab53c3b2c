"""Docker as a backend: the same limits and no network, in containers of a local daemon.

Invariant: a container has a name of its own, by which it is removed when its block ends. Images are never downloaded.
"""

from __future__ import annotations

import os
import secrets
import subprocess
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final, Protocol

import anyio

from agentrl.errors import ConfigError, EnvironmentFault
from agentrl_sandbox.base import BoxSandbox
from agentrl_sandbox.box import Use, run_in_box, wait_until_ready
from agentrl_sandbox.inside import files_inside
from agentrl_sandbox.pipes import PipedBox, PipedProcess
from agentrl_sandbox.types import Limits, Program, python_program
from agentrl_sandbox.unsafe import write_tree

_USERS: Final = range(10_000, 60_000)
"""Users of programs, one for each container: the kernel counts the processes of a user."""
REMOVE_S: Final = 300.0
"""Seconds that an engine has to remove a container. Its programs have ended long before; their files may be many."""
_NPROC: Final = 16_384
"""Processes of a user, whom several containers may share; podman asks for more than it may have where none is named."""
_COPY: Final = 'cd /work && cp -R /input/. /work/ && echo ready >&2 && exec "$@"'
_KEPT: Final = ("PATH", "HOME", "DOCKER_HOST", "DOCKER_CONTEXT", "DOCKER_CONFIG", "DOCKER_CERT_PATH", "DOCKER_TLS_VERIFY")
"""Variables of this process that the docker command needs; programs do not see them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Docker:
    """The image and the command of containers."""

    image: str
    """An image of this machine with Python 3.9 or newer as `python3`, `/bin/sh`, and bash for sessions' shells."""
    command: tuple[str, ...] = ("docker",)
    runtime: str | None = None
    """Of the daemon, such as `runsc` for gVisor; None: its default."""


def docker_arguments(docker: Docker, program: Program, limits: Limits, *, name: str, folder: str) -> list[str]:
    """Return the command that runs `program` in a container called `name`; `folder` has its files in `input`, `agentrl`."""
    space = f"rw,nosuid,nodev,exec,mode=1777,nr_inodes={limits.num_files}"
    user = _USERS[secrets.randbelow(len(_USERS))]
    words = ["--init", "--read-only", "--user", f"{user}:{user}"]
    words += ["--ulimit", f"cpu={limits.cpu_s}:{limits.cpu_s + 1}"]
    words += ["--tmpfs", f"/work:{space},size={limits.work_mb}m", "--tmpfs", f"/tmp:{space},size={limits.temp_mb}m"]
    mounts = {"/input": f"{folder}/input", "/run/agentrl": f"{folder}/agentrl"}
    variables = {"HOME": "/work", "LANG": "C.UTF-8", "TMPDIR": "/tmp", **program.environment}
    words = [*walls(docker, limits, name), *words, *inside_words(docker, mounts, variables)]
    return [*words, "--entrypoint", "/bin/sh", docker.image, "-c", _COPY, "sh", *program.argv]


def walls(docker: Docker, limits: Limits, name: str, *, network: str | None = None) -> list[str]:
    """Return the words of every container called `name`: without capabilities, in that network or none, and under limits.

    A mounted directory keeps its mode only where it is not the working directory.
    """
    words = [*docker.command, "run", "--rm", "--interactive", "--pull", "never", "--name", name]
    words += ["--network", network or "none"]
    words += ["--cap-drop", "ALL", "--security-opt", "no-new-privileges", "--workdir", "/", "--stop-timeout", "0"]
    words += ["--memory", f"{limits.memory_mb}m", "--memory-swap", f"{limits.memory_mb}m"]
    words += ["--pids-limit", str(limits.processes), "--ulimit", f"nofile={limits.open_files}:{limits.open_files}"]
    words += ["--ulimit", f"nproc={_NPROC}:{_NPROC}", "--ulimit", "core=0:0"]
    return [*words, "--shm-size", f"{limits.shared_mb}m", "--hostname", "sandbox", "--log-driver", "none"]


def inside_words(docker: Docker, mounts: Mapping[str, str], variables: Mapping[str, str]) -> list[str]:
    """Return the arguments that give a container directories of this machine, read-only, and variables."""
    words: list[str] = []
    for inner, outer in mounts.items():
        words += ["--mount", f"type=bind,source={outer},target={inner},readonly"]
    for key, value in variables.items():
        words += ["--env", f"{key}={value}"]
    return words if docker.runtime is None else [*words, "--runtime", docker.runtime]


class DockerWords(Protocol):
    """Makes the command of a container."""

    def __call__(self, docker: Docker, program: Program, limits: Limits, *, name: str, folder: str) -> list[str]: ...


class DockerBox(PipedBox):
    """A running container, through the command that runs it."""

    def __init__(self, process: PipedProcess, docker: Docker, name: str) -> None:
        super().__init__(process)
        self._docker, self._name = docker, name

    async def kill(self) -> None:
        """Remove the container; a docker that does not end is an EnvironmentFault."""
        if self._is_dead:
            return
        with anyio.CancelScope(shield=True):
            await self._remove()
            self._process.kill()
            await self._process.wait()
            await self._remove()  # once more, for a container that was just being made
        self._is_dead = True

    async def _remove(self) -> None:
        remover = PipedProcess([*self._docker.command, "rm", "--force", self._name], environment=docker_variables())
        with anyio.move_on_after(REMOVE_S) as patience:
            await remover.wait()
        remover.kill()
        await remover.wait()
        remover.close()
        if patience.cancelled_caught:
            engine = self._docker.command[0]
            raise EnvironmentFault(f"sandbox: {engine} did not remove {self._name} within {REMOVE_S:g} s")


class DockerStarter:
    """Starts containers, with the words of `arguments` and the further files `own_files` in `/run/agentrl`.

    A starter with a `name` gives it to its container, and starts one at a time.
    """

    def __init__(
        self,
        docker: Docker,
        arguments: DockerWords = docker_arguments,
        own_files: Mapping[str, bytes] | None = None,
        name: str | None = None,
    ) -> None:
        self._docker, self._arguments, self._own_files, self._name = docker, arguments, dict(own_files or {}), name

    @asynccontextmanager
    async def start(self, program: Program, limits: Limits, *, use: Use = "program") -> AsyncGenerator[DockerBox]:
        """Start `program` in a container, yield it, and remove it when the block ends."""
        del use
        name = self._name or container_name()
        with TemporaryDirectory(prefix="agentrl-docker-") as folder:
            _fill(Path(folder), program, self._own_files)
            command = self._arguments(self._docker, program, limits, name=name, folder=folder)
            try:  # podman's monitor writes a file where it was started, once a program had no memory left
                process = PipedProcess(command, environment=docker_variables(), directory=folder)
            except OSError as error:
                raise EnvironmentFault(f"sandbox: cannot start {command[0]}: {error}") from error
            box = DockerBox(process, self._docker, name)
            try:
                await wait_until_ready(box.stderr)
                yield box
            finally:
                await box.kill()
                process.close()


def container_name() -> str:
    """Return a name that no other container has."""
    return f"agentrl-{secrets.token_hex(8)}"


def _fill(folder: Path, program: Program, own_files: Mapping[str, bytes]) -> None:
    """Write what the container reads; the container's user is not this one."""
    folder.chmod(0o755)
    (folder / "input").mkdir()
    write_tree(folder / "input", program.files)
    write_tree(folder / "agentrl", {**files_inside("session"), **own_files})
    for path in folder.rglob("*"):
        path.chmod(0o755 if path.is_dir() or path.name in own_files else 0o644)


def docker_variables() -> dict[str, str]:
    """Return the environment of the docker command."""
    return {name: os.environ[name] for name in _KEPT if name in os.environ}


async def open_docker(docker: Docker, *, limits: Limits | None = None) -> BoxSandbox:
    """Return a sandbox in containers, after one has run a program.

    Raises:
        ConfigError: docker, its daemon or the image is missing, or the program did not run.
    """
    check_docker(docker)
    starter = DockerStarter(docker)
    try:
        result = await run_in_box(starter, python_program("print(6 * 7)"), Limits(wall_s=60))
    except EnvironmentFault as error:
        raise ConfigError(f"sandbox: docker runs no program: {error}") from error
    if result.text != "42":
        raise ConfigError(f"sandbox: a program in the image {docker.image} did not run: {result.text}")
    command = ("python3", "-I", "-S", "-B", "/run/agentrl/supervisor.py")
    return BoxSandbox("docker", starter, command, is_isolated=True, limits=limits)


def check_docker(docker: Docker, *, engine: str = "docker") -> None:
    """Refuse a machine without the command, its daemon or the image; the ConfigError has the fix."""
    daemon = "start the Docker daemon and let this user reach it" if engine == "docker" else f"see why {engine} fails"
    wanted = {
        daemon: ["version", "--format", "{{.Server.Version}}"],
        f"pull it: `{engine} pull {docker.image}`": ["image", "inspect", "--format", "{{.Id}}", docker.image],
    }
    for fix, words in wanted.items():
        command = [*docker.command, *words]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=docker_variables())
        except OSError as error:
            raise ConfigError(f"sandbox: cannot start {docker.command[0]}: {error}; install {engine}") from error
        except subprocess.TimeoutExpired as error:
            raise ConfigError(f"sandbox: `{' '.join(command)}` took more than {error.timeout:g} s; {daemon}") from error
        if done.returncode != 0:
            said = done.stderr.strip().splitlines() or ["it said nothing"]
            raise ConfigError(f"sandbox: `{engine} {' '.join(words[:2])}` failed: {said[-1]}; {fix}")
