"""Workbenches over docker and podman, which know no layers of ours.

Each run is a new environment, into which the layers so far are unpacked. At its end the supervisor packs what has changed,
and the environment is deleted, so that nothing of one run lives in the next.

Invariant: what a layer says comes from a container in which an agent may be root. It is data: of it only what is kept
reaches another run, so an agent that forges its layer gains nothing over one that writes files.
"""

from __future__ import annotations

import base64
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

import anyio
import anyio.to_thread
import msgspec

from agentrl.errors import ConfigError, EnvironmentFault
from agentrl.support.concurrency import outside_work
from agentrl_sandbox.containers.container import Container
from agentrl_sandbox.containers.layer_archive import make_layer, snapshot_layers
from agentrl_sandbox.containers.layer_files import read_layer_files
from agentrl_sandbox.containers.protocol import (
    CONTAINER_VARIABLES,
    MAX_STARTING,
    BenchRole,
    BuildsImages,
    BuiltImage,
    LayerFile,
    MissingImage,
    Variables,
)
from agentrl_sandbox.containers.services.docker_service import DockerService
from agentrl_sandbox.containers.services.layer_bytes import is_layer, keep_in_layer, names_at_top, read_in_layer
from agentrl_sandbox.containers.services.relayed_port import relayed_port
from agentrl_sandbox.containers.starting import turn_to_start
from agentrl_sandbox.passage import Port
from agentrl_sandbox.session import Session
from agentrl_sandbox.types import MIB, Limits

_COPY_S: Final = 300.0
"""Seconds that the supervisor has for a piece of a layer."""
_PIECE: Final = MIB
"""Bytes of a layer that one request carries: the supervisor's memory counts as that of the programs."""


class _CopiedLayer(NamedTuple):
    """The archive of a layer."""

    data: bytes
    is_of_run: bool = False
    """Whether programs of a run made it: what of it cannot be applied is left out then, and no fault."""


class CopiedWorkbench:
    """The layers of one episode, in the memory of this process."""

    def __init__(self, service: DockerService, image: str, limits: Limits, starting: anyio.Semaphore) -> None:
        self._service, self._image, self.limits, self._starting = service, image, limits, starting
        self._layers: list[_CopiedLayer] = []
        self._runs = False

    async def add(self, files: Mapping[str, LayerFile]) -> None:
        """Put a layer over the others as `Workbench.add` describes."""
        contents = await anyio.to_thread.run_sync(read_layer_files, files)
        self._layers.append(_CopiedLayer(await anyio.to_thread.run_sync(make_layer, contents)))

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
        """Start a container as `Workbench.run` describes; a relay in it carries what goes to the port.

        Raises:
            ConfigError: another container of this workbench runs.
        """
        limits = limits or self.limits
        if self._runs:
            raise ConfigError("containers: a workbench has one container at a time; end the other one first")
        variables = {**CONTAINER_VARIABLES, **(environment or {})}
        self._runs = True
        try:
            async with AsyncExitStack() as stack:
                async with turn_to_start(self._starting):
                    place = await stack.enter_async_context(self._service.start(self._image, limits, variables, network))
                    await self._prepare(place.session)
                    if port is not None:
                        await stack.enter_async_context(relayed_port(place.python, port))
                yield Container(place.session, directory)
                layer = await self._changes(place.session)
        finally:
            self._runs = False
        self._layers.append(_CopiedLayer(layer, is_of_run=True))

    async def _prepare(self, session: Session) -> None:
        try:
            for layer in self._layers:
                for at in range(0, len(layer.data), _PIECE):
                    content, end = base64.b64encode(layer.data[at : at + _PIECE]).decode(), at + _PIECE
                    is_last = end >= len(layer.data)
                    await self._asked(session, do="unpack", content=content, is_last=is_last, strict=not layer.is_of_run)
            await self._asked(session, do="mark")
        except OSError as error:
            raise EnvironmentFault(f"containers: {self._service.name} cannot hold the files of a task: {error}") from error

    async def _asked(self, session: Session, **request: object) -> None:
        if await session.do(request, _COPY_S) is None:
            raise EnvironmentFault(f"containers: an environment of {self._service.name} ended as it started")

    async def _changes(self, session: Session) -> bytes:
        """Return the newest layer: nothing where a limit has ended the supervisor, or where it cannot say what changed."""
        pieces: list[bytes] = []
        request = {"do": "pack", "budget": self.limits.work_mb * MIB}
        with suppress(OSError):
            while reply := await session.do(request, _COPY_S):
                if not reply.content:
                    layer = b"".join(pieces)
                    return layer if await anyio.to_thread.run_sync(is_layer, layer) else make_layer({})
                pieces.append(reply.content)
        return make_layer({})

    async def keep(self, paths: Sequence[str], *, homes: Sequence[str] = ()) -> None:
        """Keep parts of the newest layer as `Workbench.keep` describes."""
        newest = self._layers[-1]
        kept = await anyio.to_thread.run_sync(partial(keep_in_layer, newest.data, paths, homes))
        self._layers[-1] = newest._replace(data=kept)

    async def changed(self) -> list[str]:
        """Return the absolute paths of what stands at the top of the newest layer."""
        return names_at_top(self._layers[-1].data)

    async def read(self, path: str, *, max_bytes: int = 65_536) -> bytes:
        """Return a file of the newest layer as `Workbench.read` describes."""
        return read_in_layer(self._layers[-1].data, path, max_bytes)

    async def snapshot(self) -> bytes:
        """Return the layers as `Workbench.snapshot` describes."""
        if self._runs:
            raise ConfigError("containers: the layers of a running container are not whole; end it first")
        return msgspec.msgpack.encode([layer.data for layer in self._layers])

    async def restore(self, snapshot: bytes) -> None:
        """Put layers over those that are there as `Workbench.restore` describes."""
        self._layers += map(_CopiedLayer, await anyio.to_thread.run_sync(snapshot_layers, snapshot))


class CopiedContainers:
    """Makes workbenches over a service.

    Args:
        service: starts the environments.
        images: what the service calls the images that tasks name; `"*"` stands for all other names, and None as a value
            for the name itself.
        default: the image of tasks that name none.
        missing: why images of `images` are not there, by the names that the service has for them.
        limits: of workbenches that bring none.
        max_open: workbenches at a time, beside the second ones of episodes.
        max_starting: environments that start at a time.
        builder: builds images of the folders of tasks; None: nothing is built.
    """

    def __init__(
        self,
        service: DockerService,
        images: Mapping[str, str | None],
        *,
        default: str,
        missing: Mapping[str, ConfigError],
        limits: Limits,
        max_open: int = 64,
        max_starting: int = MAX_STARTING,
        builder: BuildsImages | None = None,
    ) -> None:
        self.name = service.name
        self._service, self._images, self._default, self._limits = service, dict(images), default, limits
        self._missing, self._builder = missing, builder
        self._open, self._starting = anyio.Semaphore(max_open), anyio.Semaphore(max_starting)

    async def built_from(self, folder: Path, *, timeout_s: float) -> BuiltImage:
        """Return the image of a folder as `BuildsImages.built_from` describes."""
        return await self._having_builder().built_from(folder, timeout_s=timeout_s)

    async def described(self, name: str) -> BuiltImage | None:
        """Return what an image says as `BuildsImages.described` describes."""
        return await self._having_builder().described(name)

    def _having_builder(self) -> BuildsImages:
        if self._builder is None:
            raise ConfigError(f"containers: these of {self.name} build no images; set `build: engine`")
        return self._builder

    @asynccontextmanager
    async def workbench(
        self, *, image: str | None = None, limits: Limits | None = None, role: BenchRole = "alone"
    ) -> AsyncGenerator[CopiedWorkbench]:
        """Open the file system of an episode as `Containers.workbench` describes."""
        chosen = self._default if image is None else self._images.get(image, self._images.get("*")) or image
        if chosen in self._missing:
            raise MissingImage(str(self._missing[chosen]))
        async with AsyncExitStack() as stack:
            if role != "second":
                with outside_work():
                    await stack.enter_async_context(self._open)
            yield CopiedWorkbench(self._service, chosen, limits or self._limits, self._starting)
