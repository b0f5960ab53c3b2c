"""Places the environments of a run on several hosts, by free memory, and notices hosts that come and go.

Invariant: an environment is opened on a host that has its image and room for it. Those of one image are opened in the order
in which they were asked for. The episodes of a host that is gone fail as faults of the infrastructure, so they run again,
and no further one is placed there until it answers again.
"""

from __future__ import annotations

import secrets
from collections import defaultdict
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Final

import aiohttp
import anyio

from agentrl.concurrency import outside_work, task_group
from agentrl.errors import ConfigError, EnvironmentFault
from agentrl.sandbox.containers.fleet.remote_host import NoRoom, RemoteHost, RemoteWorkbench
from agentrl.sandbox.containers.protocol import ANY_IMAGE, CONTAINER_LIMITS, MAX_STARTING
from agentrl.sandbox.containers.starting import turn_to_start
from agentrl.sandbox.types import Limits

LIFE_S: Final = 2.0
"""Seconds between two signs of life of a run."""
PLACE_S: Final = 3600.0
"""Seconds that an environment may wait for a host with room."""
GONE_S: Final = 300.0
"""Seconds that it waits while no host answers at all."""


class HostFleet:
    """Makes workbenches on hosts; `open_fleet` opens one for the whole process.

    Args:
        hosts: that have answered.
        images: as the run file names them: the folders lie on the hosts, so only None, the default root, has a meaning.
        limits: of workbenches that bring none.
        max_open: workbenches at a time.
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
        self._placing: defaultdict[str | None, anyio.Lock] = defaultdict(anyio.Lock)
        """By image, so that one that waits for its hosts holds up no other."""
        self._changed = anyio.Event()

    @asynccontextmanager
    async def workbench(self, *, image: str | None = None, limits: Limits | None = None) -> AsyncGenerator[RemoteWorkbench]:
        """Open the file system of an episode on the host with most free memory.

        Raises:
            ConfigError: all hosts answer, and none has the image or gives as much as `limits` ask for.
            EnvironmentFault: none has had room for an hour, or a host is lost.
        """
        limits = limits or self._limits
        wanted = None if image is None or self._images.get(image, self._images.get("*", image)) is None else image
        async with AsyncExitStack() as stack:
            with outside_work():
                await stack.enter_async_context(self._open)
            bench = await self._opened(stack, wanted, limits)
            stack.callback(self.note_change)
            yield bench

    async def _opened(self, stack: AsyncExitStack, image: str | None, limits: Limits) -> RemoteWorkbench:
        """Open a workbench where there is room; where a host refuses, or is lost meanwhile, try the next one."""
        while True:
            with outside_work():
                host = await self._place(image, limits)
            try:
                async with turn_to_start(self._starting):
                    return await stack.enter_async_context(host.workbench(image, limits))
            except NoRoom:
                await host.beat()  # others have taken the room that it had
                await self._wait_for_change()
            except EnvironmentFault:
                if host.state is not None:
                    raise
            finally:
                host.release(limits)

    async def _place(self, image: str | None, limits: Limits) -> RemoteHost:
        """Return a host that has room, with that reserved."""
        with anyio.move_on_after(PLACE_S):
            async with self._placing[image]:
                gone_at = anyio.current_time() + GONE_S
                while anyio.current_time() < gone_at:
                    if all(host.state is not None for host in self.hosts):
                        _refuse_misfit(self.hosts, image, limits)
                    found = [host for host in self.hosts if host.has_room_for(image, limits)]
                    if found:
                        host = max(found, key=lambda host: host.free_mb)
                        host.reserve(limits)
                        return host
                    if any(host.state is not None for host in self.hosts):
                        gone_at = anyio.current_time() + GONE_S
                    await self._wait_for_change()
        said = "; ".join(host.describe() for host in self.hosts)
        raise EnvironmentFault(
            f"containers: no host had room within {PLACE_S:g} s, or none has answered for {GONE_S:g} s: {said}"
        )

    def note_change(self) -> None:
        """Look for room again."""
        self._changed.set()
        self._changed = anyio.Event()

    async def _wait_for_change(self) -> None:
        with anyio.move_on_after(LIFE_S):
            await self._changed.wait()

    async def watch(self, host: RemoteHost) -> None:
        """Tell a host that this run lives, and learn of its state, until cancelled."""
        while True:
            await anyio.sleep(LIFE_S)
            await host.beat()
            self.note_change()


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
        max_open: workbenches at a time, over all hosts.
        max_starting: workbenches that open at a time, over all hosts.

    Raises:
        ConfigError: no host answers, one refuses the key, or none has an image of `images` and gives as much as `limits`
            ask for.
    """
    if not urls or len(set(urls)) < len(urls):
        raise ConfigError(f"containers: expected addresses of different hosts, got {list(urls)}")
    headers = {"Content-Type": "application/json"}
    if api_key is not None:
        headers["Authorization"] = f"Bearer {api_key}"
    chosen, client = limits or CONTAINER_LIMITS, secrets.token_hex(8)
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=10.0)
    async with aiohttp.ClientSession(headers=headers, trust_env=False, connector=connector, timeout=timeout) as http:
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
    for image in (None, *(name for name, folder in images.items() if folder is not None and name != ANY_IMAGE)):
        _refuse_misfit(hosts, image, limits)


def _refuse_misfit(hosts: Sequence[RemoteHost], image: str | None, limits: Limits) -> None:
    """Raise ConfigError where no host can ever open such an environment."""
    problems = [host.misfit(image, limits) for host in hosts]
    if None not in problems:
        said = "; ".join(problem for problem in problems if problem is not None)
        name = "the default image" if image is None else f"the image {image}"
        raise ConfigError(f"containers: no host can hold an environment of {name}: {said}")
