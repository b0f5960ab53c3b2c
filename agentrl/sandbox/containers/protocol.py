"""What an episode needs of a container, whatever runs it.

A workbench is the file system of one episode. Each run on it is a container with processes of its own; when a run ends,
every process of it has ended, and what it wrote is the newest layer. The next run begins with the layers that were kept, so
what a second run checks can no longer be touched by the first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Protocol, TypeAlias

from agentrl.sandbox.types import Limits, Result

Variables: TypeAlias = Mapping[str, str] | None
"""Of the environment of programs, by name."""
LayerFile: TypeAlias = bytes | Path
"""Contents, or a file of this machine, whose executable bit goes along."""


class Container(Protocol):
    """A running container."""

    async def shell(self, command: str, *, timeout_s: float | None = None) -> Result:
        """Run lines of bash, with the directory, variables and functions of the lines before; both outputs are `stdout`."""
        ...

    async def execute(self, argv: Sequence[str], *, environment: Variables = None, timeout_s: float | None = None) -> Result:
        """Run a command beside the shell to its end; what it leaves in its process group ends with it."""
        ...

    async def upload(self, files: Mapping[str, bytes]) -> None:
        """Write files by their absolute paths, with the folders above them; a full disk is an OSError."""
        ...

    async def download(self, path: str, *, max_bytes: int) -> bytes:
        """Return a regular file; one that is missing, larger, or reached through a link is an OSError."""
        ...


class Workbench(Protocol):
    """The file system of one episode, in layers."""

    async def add(self, files: Mapping[str, LayerFile]) -> None:
        """Put a layer with these files, by their absolute paths, over the others; between runs only.

        A path that ends in a slash is a directory, whatever its contents.
        """
        ...

    def run(
        self, *, directory: str = "/", environment: Variables = None, limits: Limits | None = None, port: int | None = None
    ) -> AbstractAsyncContextManager[Container]:
        """Start a container over the layers; at the block's end its processes have ended, and its changes are a layer.

        Args:
            directory: of the shell and of commands.
            environment: variables beside PATH, HOME, LANG and TERM.
            limits: None: those of the workbench.
            port: a port of this machine's loopback that the container reaches under the same number, and nothing else.

        Raises:
            EnvironmentFault: it does not start.
        """
        ...

    async def keep(self, paths: Sequence[str], *, homes: Sequence[str] = ()) -> None:
        """Keep of the newest layer these directories and files, and of `homes` what is not hidden; forget the rest.

        A link in the place of one of these, or of a directory above it, is not kept.
        """
        ...

    async def changed(self) -> list[str]:
        """Return the absolute paths of what the newest layer has at its top, such as `/app`."""
        ...

    async def read(self, path: str, *, max_bytes: int = 65_536) -> bytes:
        """Return a regular file that the newest layer holds.

        Raises:
            OSError: the layer has no such file, it is larger, or a link stands in its way.
        """
        ...


class Containers(Protocol):
    """Makes workbenches."""

    @property
    def name(self) -> str:
        """The backend, such as `bubblewrap`."""
        ...

    def workbench(self, *, image: str | None = None, limits: Limits | None = None) -> AbstractAsyncContextManager[Workbench]:
        """Open the file system of an episode over an image; None: the default one. Nothing is left at the block's end.

        Raises:
            ConfigError: there is no such image.
            EnvironmentFault: it cannot be opened.
        """
        ...
