"""Containers by bubblewrap: the workbench of an episode, and the container of one run on it."""

from __future__ import annotations

import logging
import os
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar

import anyio
import anyio.to_thread

from agentrl.errors import ConfigError, EnvironmentFault
from agentrl.support.concurrency import outside_work
from agentrl_sandbox.box import open_session
from agentrl_sandbox.bubblewrap.host import Host, find_host
from agentrl_sandbox.bubblewrap.seccomp import native_architecture, seccomp_filter
from agentrl_sandbox.bubblewrap.start import SUPERVISOR_FOLDER
from agentrl_sandbox.bubblewrap.usage import ControlGroups, find_control_groups
from agentrl_sandbox.containers.container import Container
from agentrl_sandbox.containers.layer_archive import make_layer, read_layers, snapshot_layers, write_layers
from agentrl_sandbox.containers.layer_files import (
    files_as,
    keep_parts,
    read_from_layer,
    read_layer_files,
    top_of_layer,
)
from agentrl_sandbox.containers.layer_memory import LayerMemory, LayerTools, find_layer_tools, hold_memory
from agentrl_sandbox.containers.protocol import (
    ANY_IMAGE,
    CONTAINER_LIMITS,
    CONTAINER_VARIABLES,
    MAX_STARTING,
    BenchRole,
    LayerFile,
    MissingImage,
    Variables,
    without_network,
)
from agentrl_sandbox.containers.roots import CONTAINER_UID, RootFolder, folder_root, make_default_root
from agentrl_sandbox.containers.starter import WRAPPER, LayerStarter, OneUserId
from agentrl_sandbox.containers.starting import turn_to_start
from agentrl_sandbox.passage import Port
from agentrl_sandbox.types import Limits

logger = logging.getLogger(__name__)
Done = TypeVar("Done")


class BubblewrapWorkbench:
    """The layers of one episode, in the memory of its own namespace."""

    def __init__(self, parts: _Parts, root: RootFolder, memory: LayerMemory, limits: Limits) -> None:
        self._parts, self._root, self._memory, self.limits = parts, root, memory, limits
        self._layers: list[str] = []
        """Paths in the memory, the lowest first."""
        self._count = 0
        self._runs = False

    async def add(self, files: Mapping[str, LayerFile]) -> None:
        """Put a layer over the others as `Workbench.add` describes; a file in a read-only `/usr` is a ConfigError."""
        self._root.check_holds(files)
        name = self._new_name()
        contents = await anyio.to_thread.run_sync(read_layer_files, files)
        layer = await anyio.to_thread.run_sync(make_layer, contents)
        await self._in_thread(partial(write_layers, [layer], [self._memory.outside / name]))
        self._layers.append(name)

    @asynccontextmanager
    async def run(
        self,
        *,
        directory: str = "/",
        environment: Variables = None,
        limits: Limits | None = None,
        port: Port | None = None,
        network: str | None = None,
    ) -> AsyncGenerator[Container]:
        """Start a container as `Workbench.run` describes."""
        if network is not None:
            raise without_network(network, "bubblewrap")
        if self._runs:
            raise ConfigError("containers: a workbench has one container at a time; end the other one first")
        limits, name = limits or self.limits, self._new_name()
        await self._in_thread((self._memory.outside / name).mkdir)
        lower = [*(f"{self._memory.inside}/{layer}" for layer in reversed(self._layers)), str(self._root.path)]
        parts = self._parts
        starter = LayerStarter(
            parts.host,
            parts.seccomp,
            parts.uids,
            parts.groups,
            tools=parts.tools,
            memory=self._memory,
            root=self._root,
            lower=lower,
            place=f"{self._memory.inside}/{name}",
            limits=limits,
            environment={**CONTAINER_VARIABLES, **(environment or {})},
        )
        self._runs = True
        try:
            async with AsyncExitStack() as stack:
                async with parts.turn_to_start():
                    opened = open_session(starter, parts.supervisor(self._root), limits, None, port)
                    session = await stack.enter_async_context(opened)
                yield Container(session, directory)
        finally:
            self._runs = False
        self._layers.append(f"{name}/upper")

    async def keep(self, paths: Sequence[str], *, homes: Sequence[str] = ()) -> None:
        """Keep parts of the newest layer as `Workbench.keep` describes."""
        layer = self._layers.pop()
        kept = f"{Path(layer).parent}/kept"
        outside = self._memory.outside
        await self._in_thread(partial(keep_parts, outside / layer, outside / kept, paths, homes))
        self._layers.append(kept)

    async def changed(self) -> list[str]:
        """Return the absolute paths at the top of the newest layer."""
        return await self._in_thread(partial(top_of_layer, self._memory.outside / self._layers[-1]))

    async def read(self, path: str, *, max_bytes: int = 65_536) -> bytes:
        """Return a file of the newest layer as `Workbench.read` describes."""
        return read_from_layer(self._memory.outside / self._layers[-1], path, max_bytes)

    async def snapshot(self) -> bytes:
        """Return the layers as `Workbench.snapshot` describes."""
        self._check_rests()
        places = [self._memory.outside / layer for layer in self._layers]
        return await self._in_thread(partial(read_layers, places))

    async def restore(self, snapshot: bytes) -> None:
        """Put layers over those that are there, as `Workbench.restore` describes."""
        self._check_rests()
        layers = await anyio.to_thread.run_sync(snapshot_layers, snapshot)
        names = [self._new_name() for _ in layers]
        await self._in_thread(partial(write_layers, layers, [self._memory.outside / name for name in names]))
        self._layers += names

    def _check_rests(self) -> None:
        if self._runs:
            raise ConfigError("containers: the layers of a running container are not whole; end it first")

    async def _in_thread(self, work: Callable[[], Done]) -> Done:
        """Do something to the layers as the user that owns them."""

        def done() -> Done:
            with files_as(self._parts.owner):
                return work()

        try:
            return await anyio.to_thread.run_sync(done)
        except OSError as error:
            raise EnvironmentFault(f"containers: cannot read or write a layer: {error}") from error

    def _new_name(self) -> str:
        self._count += 1
        return str(self._count)


class _Parts:
    """The parts that all workbenches of a process share."""

    def __init__(self, host: Host, tools: LayerTools, groups: ControlGroups | None, max_starting: int) -> None:
        self.host, self.tools, self.groups = host, tools, groups
        self._starting = anyio.Semaphore(max_starting)
        self.seccomp = seccomp_filter(native_architecture())
        self.uids = OneUserId()

    @asynccontextmanager
    async def turn_to_start(self) -> AsyncGenerator[None]:
        """Wait until fewer environments start than may at a time; `START_S` later it is an EnvironmentFault."""
        async with turn_to_start(self._starting):
            yield

    @property
    def owner(self) -> int | None:
        """The user that owns layers; None: this process's own."""
        return CONTAINER_UID if self.host.setpriv is not None else None

    def supervisor(self, root: RootFolder) -> tuple[str, ...]:
        """Return Python and the supervisor, as a container with this root sees them."""
        python = self.host.python if root.shows_usr else WRAPPER
        return (python, "-I", "-S", "-B", f"{SUPERVISOR_FOLDER}/supervisor.py")


class BubblewrapContainers:
    """Makes workbenches on this machine; `open_containers` opens one for the whole process.

    Args:
        parts: programs of this machine.
        folder: a directory of this process, where layers are mounted and roots lie.
        images: roots of unpacked images, by the names that tasks have for them, or why a folder is none.
        default: the root of what names no image.
        limits: of workbenches that bring none.
        max_open: workbenches at a time, beside the second ones of episodes.
    """

    name = "bubblewrap"

    def __init__(
        self,
        parts: _Parts,
        folder: Path,
        images: Mapping[str, RootFolder | ConfigError],
        *,
        default: RootFolder,
        limits: Limits,
        max_open: int,
    ) -> None:
        self._parts, self.folder, self._images, self._default = parts, folder, dict(images), default
        self._limits = limits
        self._open = anyio.Semaphore(max_open)

    def root(self, image: str | None) -> RootFolder:
        """Return the root of an image; one that is not there is a ConfigError, with those that are."""
        found = self._default if image is None else self._images.get(image, self._images.get(ANY_IMAGE))
        if isinstance(found, ConfigError):
            raise MissingImage(f"containers: images: {image}: {found}")
        if found is None:
            raise ConfigError(
                f"containers: there is no image {image!r}; `images` has {sorted(self._images) or 'none'}; name the "
                "folder that it was unpacked into, or null for the programs of this machine"
            )
        return found

    @asynccontextmanager
    async def workbench(
        self, *, image: str | None = None, limits: Limits | None = None, role: BenchRole = "alone"
    ) -> AsyncGenerator[BubblewrapWorkbench]:
        """Open the file system of an episode as `Containers.workbench` describes."""
        root = self.root(image)
        async with AsyncExitStack() as stack:
            if role != "second":
                with outside_work():
                    await stack.enter_async_context(self._open)
            parts = self._parts
            async with parts.turn_to_start():
                held = hold_memory(parts.host, parts.tools, CONTAINER_UID, self.folder)
                memory = await stack.enter_async_context(held)
            yield BubblewrapWorkbench(parts, root, memory, limits or self._limits)


@asynccontextmanager
async def open_containers(
    *,
    images: Mapping[str, str | None] | None = None,
    limits: Limits | None = None,
    max_open: int = 64,
    max_starting: int = MAX_STARTING,
) -> AsyncGenerator[BubblewrapContainers]:
    """Open containers by bubblewrap, after one has proved that layers work on this machine.

    Args:
        images: folders of unpacked images, by the names that tasks have for them; `"*"` stands for all other names, and
            None as a folder for the programs of this machine.
        limits: of containers that bring none; None: `CONTAINER_LIMITS`.
        max_open: workbenches at a time, beside the second ones of episodes; others wait in order.
        max_starting: workbenches that open, and containers that start, at a time; running ones do not count.

    Raises:
        ConfigError: a program is missing, or the kernel refuses. A folder that is no image is one when it is needed.
    """
    host = find_host()
    parts = _Parts(host, find_layer_tools(), find_control_groups(), max_starting)
    with TemporaryDirectory(prefix="agentrl-containers-", ignore_cleanup_errors=True) as place:
        os.chmod(place, 0o755)
        for name in ("layers", "root"):
            (Path(place) / name).mkdir()
        default = make_default_root(Path(place) / "root", parts.owner)
        roots = {
            name: default if path is None else _root_or_problem(name, Path(path)) for name, path in (images or {}).items()
        }
        containers = BubblewrapContainers(
            parts,
            Path(place) / "layers",
            roots,
            default=default,
            limits=limits or CONTAINER_LIMITS,
            max_open=max_open,
        )
        await _check_layers(containers)
        yield containers


def _root_or_problem(name: str, path: Path) -> RootFolder | ConfigError:
    """Return the root in the folder of an image, or why it is none: perhaps no task needs it, unless it is that of all."""
    try:
        return folder_root(path)
    except ConfigError as error:
        if name == ANY_IMAGE:
            raise
        logger.warning("images: %s: %s; tasks that need it fail", name, error)
        return error


async def _check_layers(containers: BubblewrapContainers) -> None:
    """Refuse a machine whose kernel does not mount layers for an ordinary user, or does so without their effect."""
    try:
        async with containers.workbench() as bench:
            await bench.add({"/app/there": b"1"})
            async with bench.run(directory="/app") as container:
                said = await container.execute(["/bin/sh", "-c", "rm there && echo $(id -u) > made"])
            made = await bench.read("/app/made")
    except (EnvironmentFault, OSError) as error:
        raise ConfigError(
            f"containers: this machine cannot run them: {error}; they need Linux 6.6 or newer, user namespaces for "
            "ordinary users, and overlayfs"
        ) from error
    if made != b"0\n":
        raise ConfigError(f"containers: their self-test wrote {made!r}: {said.text}")
