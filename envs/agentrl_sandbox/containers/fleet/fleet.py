"""Places the environments of a run on several hosts, by free memory, and notices hosts that come and go.

Invariant: an environment is opened on a host that has its image and room for it. The episodes of a host that is gone fail as
faults of the infrastructure, so they run again, and no further one is placed there until it answers again.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Final

import anyio

from agentrl.errors import ConfigError, EnvironmentFault
from agentrl.support.concurrency import outside_work, task_group
from agentrl_sandbox.containers.fleet.placement import Placement, refuse_misfit
from agentrl_sandbox.containers.fleet.remote_host import RemoteHost, RemoteWorkbench
from agentrl_sandbox.containers.protocol import ANY_IMAGE, CONTAINER_LIMITS, MAX_STARTING, BenchRole, MissingImage, NoSecond
from agentrl_sandbox.containers.starting import turn_to_start
from agentrl_sandbox.remote.client import NoRoom, open_http
from agentrl_sandbox.types import Limits

logger = logging.getLogger(__name__)

LIFE_S: Final = 2.0
"""Seconds between two signs of life of a run."""


class HostFleet:
    """Makes workbenches on hosts; `open_fleet` opens one for the whole process.

    Args:
        hosts: that have answered.
        images: as the run file names them: the folders lie on the hosts, so only None, the default root, has a meaning.
        limits: of workbenches that bring none.
        max_open: workbenches at a time, beside the second ones of episodes.
        max_starting: workbenches that open at a time, over all hosts.
    """

    name = "hosts"

    def __init__(
        self,
        hosts: Sequence[RemoteHost],
        images: Mapping[str, str | None],
        *,
        limits: Limits,
        max_open: int,
        max_starting: int,
    ) -> None:
        self.hosts, self._images, self._limits = list(hosts), dict(images), limits
        self._open = anyio.Semaphore(max_open)
        self._starting = anyio.Semaphore(max_starting)
        self._placement = Placement(self.hosts)

    @asynccontextmanager
    async def workbench(
        self, *, image: str | None = None, limits: Limits | None = None, role: BenchRole = "alone"
    ) -> AsyncGenerator[RemoteWorkbench]:
        """Open the file system of an episode on the host with most free memory.

        Raises:
            ConfigError: all hosts answer, and none has the image or gives as much as `limits` ask for.
            NoSecond: it is a first one, and no host can hold its second one beside it.
            EnvironmentFault: none has had room for an hour, or a host is lost.
        """
        limits = limits or self._limits
        wanted = None if image is None or self._images.get(image, self._images.get(ANY_IMAGE, image)) is None else image
        async with AsyncExitStack() as stack:
            if role != "second":
                with outside_work():
                    await stack.enter_async_context(self._open)
            stack.callback(self._placement.look_again)
            try:
                bench = await self._opened(stack, wanted, limits, role)
            except NoSecond:
                raise
            except ConfigError as error:
                if wanted is None or wanted not in self._images:
                    raise
                raise MissingImage(str(error)) from error
            yield bench

    async def _opened(self, stack: AsyncExitStack, image: str | None, limits: Limits, role: BenchRole) -> RemoteWorkbench:
        """Open a workbench where there is room; where a host refuses, or is lost meanwhile, try the next one."""
        while True:
            with outside_work():
                host = await self._placement.host_for(image, limits, role)
            try:
                async with turn_to_start(self._starting):
                    return await stack.enter_async_context(host.workbench(image, limits, role))
            except NoRoom:
                await host.beat()  # others have taken the room that it had
                await self._placement.change()
            except ConfigError:
                await host.beat()  # it may have started again with other images and limits
                if host.state is not None and host.misfit(image, limits) is None:
                    raise
            except EnvironmentFault:
                if host.state is not None:
                    raise
            finally:
                host.release(limits, role)

    async def watch(self, host: RemoteHost) -> None:
        """Tell a host that this run lives, and learn of its state, until cancelled."""
        while True:
            await anyio.sleep(LIFE_S)
            await host.beat()
            self._placement.look_again()


@asynccontextmanager
async def open_fleet(
    urls: Sequence[str],
    *,
    api_key: str | None = None,
    images: Mapping[str, str | None] | None = None,
    limits: Limits | None = None,
    max_open: int = 64,
    max_starting: int = MAX_STARTING,
) -> AsyncGenerator[HostFleet]:
    """Connect to hosts of containers. Needs the asyncio event loop.

    Args:
        urls: of `agentrl sandbox-host`, such as `http://10.0.0.7:8710`.
        api_key: of all of them; None where they have none.
        images: as the run file names them.
        limits: of workbenches that bring none.
        max_open: workbenches at a time, over all hosts, beside the second ones of episodes.
        max_starting: workbenches that open at a time, over all hosts.

    Raises:
        ConfigError: no host answers, one refuses the key, or none gives as much as `limits` ask for.
    """
    if not urls or len(set(urls)) < len(urls):
        raise ConfigError(f"containers: expected addresses of different hosts, got {list(urls)}")
    chosen, client = limits or CONTAINER_LIMITS, secrets.token_hex(8)
    async with open_http(api_key) as http:
        hosts = [RemoteHost(url, http, client) for url in urls]
        async with task_group() as tasks:
            for host in hosts:
                tasks.start_soon(host.beat)
        _check(hosts, images or {}, chosen)
        fleet = HostFleet(hosts, images or {}, limits=chosen, max_open=max_open, max_starting=max_starting)
        async with task_group() as tasks:
            for host in hosts:
                tasks.start_soon(fleet.watch, host)
            yield fleet
            tasks.cancel_scope.cancel()


def _check(hosts: Sequence[RemoteHost], images: Mapping[str, str | None], limits: Limits) -> None:
    answered = [host for host in hosts if host.state is not None]
    if not answered:
        said = "; ".join(host.describe() for host in hosts)
        raise ConfigError(f"containers: no host answers: {said}; start one with `agentrl sandbox-host`")
    refuse_misfit(hosts, None, limits)
    for image in (name for name, folder in images.items() if folder is not None and name != ANY_IMAGE):
        try:
            refuse_misfit(hosts, image, limits)
        except ConfigError as error:  # perhaps no task needs it
            logger.warning("%s; tasks that need it fail", error)
