"""What an episode needs of a container, whatever runs it.

A workbench is the file system of one episode. Each run on it is a container with processes of its own; when a run ends,
every process of it has ended, and what it wrote is the newest layer. The next run begins with the layers that were kept, so
what a second run checks can no longer be touched by the first.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Final, Literal, NamedTuple, Protocol, TypeAlias, runtime_checkable

from agentrl.errors import ConfigError
from agentrl_sandbox.containers.container import Container
from agentrl_sandbox.passage import Port
from agentrl_sandbox.types import FileContents, Limits

Variables: TypeAlias = Mapping[str, str] | None
"""Of the environment of programs, by name."""


BenchRole: TypeAlias = Literal["alone", "first", "second"]
"""The part of a workbench in its episode: `first` while whose block is open the episode opens another one, of the same image
and limits, which is the `second`; any other one is `alone`. So a second one never waits for the end of a first."""
LayerFile: TypeAlias = bytes | Path | FileContents
"""Contents, perhaps of a program; or a file of this machine, whose executable bit goes along."""
CONTAINER_LIMITS: Final = Limits(
    wall_s=60,
    cpu_s=600,
    memory_mb=1024,
    address_space_mb=65_536,
    processes=256,
    open_files=1024,
    work_mb=256,
    num_files=32_768,
    output_kb=1024,
)
"""Of containers that bring none; `work_mb` bounds what a run writes."""
CONTAINER_VARIABLES: Final[Mapping[str, str]] = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME": "/root",
    "LANG": "C.UTF-8",
    "TERM": "dumb",
    "TAR_OPTIONS": "--no-same-owner",
}
"""The environment of programs, before the variables of a task."""
ANY_IMAGE: Final = "*"
"""The name among images that stands for those without an entry."""
START_S: Final = 600.0
"""Seconds that an environment may wait for its turn to start, while as many start as may at a time."""
MAX_STARTING: Final = 2 * (os.cpu_count() or 1) + 2
"""Environments that start at a time, unless a run says otherwise; running ones do not count."""


class MissingImage(ConfigError):
    """An image that the run file names in `images` cannot be had; an error once a task needs it."""


class NoSecond(ConfigError):
    """Nothing that could hold a first environment can hold its second one beside it, now or later."""


class BuiltImage(NamedTuple):
    """An image of an engine, and what it says of itself."""

    image: str
    """The engine's name for it."""
    env: Mapping[str, str]
    workdir: str
    user: str
    """Whom its programs run as; empty: root."""


@runtime_checkable
class BuildsImages(Protocol):
    """Containers over an engine that builds images from Dockerfiles itself."""

    async def built_from(self, folder: Path, *, timeout_s: float) -> BuiltImage:
        """Return the image of a folder with a Dockerfile, which is built where the engine does not have it.

        Raises:
            EnvironmentFault: it cannot be built; the message has the folder and the last lines of the engine.
            MissingImage: `images` names what it begins with, and that is not there.
        """
        ...

    async def described(self, name: str) -> BuiltImage | None:
        """Return what an image of the engine says of itself, by the name that tasks have for it; None: it is not there.

        Raises:
            EnvironmentFault: it is of another architecture.
        """
        ...


def without_network(network: str, name: str) -> ConfigError:
    """Return the error where a container should join a network, and `name` runs containers without one."""
    return ConfigError(f"containers: those of {name} have no network, got {network!r}; take docker or podman")


class Workbench(Protocol):
    """The file system of one episode, in layers."""

    async def add(self, files: Mapping[str, LayerFile]) -> None:
        """Put a layer with these files, by their absolute paths, over the others; between runs only.

        A path that ends in a slash is a directory, whatever its contents.
        """
        ...

    def run(
        self,
        *,
        directory: str = "/",
        environment: Variables = None,
        limits: Limits | None = None,
        port: Port | None = None,
        network: str | None = None,
    ) -> AbstractAsyncContextManager[Container]:
        """Start a container over the layers; at the block's end its processes have ended, and its changes are a layer.

        Args:
            directory: of the shell and of commands.
            environment: variables beside PATH, HOME, LANG and TERM.
            limits: None: those of the workbench.
            port: a port of this machine's loopback that the container reaches, and nothing else.
            network: of an engine, which the container joins; None: it has none.

        Raises:
            ConfigError: there is a `network`, and the containers are those of no engine.
            EnvironmentFault: it does not start.
        """
        ...

    async def keep(self, paths: Sequence[str], *, homes: Sequence[str] = ()) -> None:
        """Keep of the newest layer these directories and files, and of `homes` what is not hidden; forget the rest.

        A link in the place of one of these, or of a directory above it, is not kept.
        """
        ...

    async def changed(self) -> list[str]:
        """Return the absolute paths at the top of the newest layer, such as `/app`, without names that are not UTF-8."""
        ...

    async def read(self, path: str, *, max_bytes: int = 65_536) -> bytes:
        """Return a regular file that the newest layer holds.

        Raises:
            OSError: the layer has no such file, it is larger, or a link stands in its way.
        """
        ...

    async def snapshot(self) -> bytes:
        """Return all layers above the image, between runs, for `restore` on a workbench of the same image anywhere.

        Raises:
            EnvironmentFault: they cannot be read.
        """
        ...

    async def restore(self, snapshot: bytes) -> None:
        """Put the layers of a snapshot over those that are there, between runs.

        Raises:
            ConfigError: it is no snapshot.
            EnvironmentFault: they cannot be written.
        """
        ...


class Containers(Protocol):
    """Makes workbenches."""

    @property
    def name(self) -> str:
        """The backend, such as `bubblewrap`."""
        ...

    def workbench(
        self, *, image: str | None = None, limits: Limits | None = None, role: BenchRole = "alone"
    ) -> AbstractAsyncContextManager[Workbench]:
        """Open the file system of an episode over an image; None: the default one. Nothing is left at the block's end.

        Raises:
            ConfigError: there is no such image; `MissingImage` where `images` names it.
            NoSecond: what holds the environments cannot hold a first one and its second at the same time.
            EnvironmentFault: it cannot be opened.
        """
        ...
