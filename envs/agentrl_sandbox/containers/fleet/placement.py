"""The order in which environments get room on the hosts of a fleet.

Invariant: no environment takes a host that an earlier one waits for and could use. So a large one, and one of a rare image,
gets its turn, and waits for the hosts of no other image. Second ones of episodes go before all others, which hosts keep room
from: what a second one waits for ends without waiting itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import anyio

from agentrl.errors import ConfigError, EnvironmentFault
from agentrl_sandbox.containers.fleet.remote_host import RemoteHost
from agentrl_sandbox.containers.protocol import BenchRole, NoSecond
from agentrl_sandbox.types import Limits

PLACE_S: Final = 3600.0
"""Seconds that an environment may wait for a host with room."""
GONE_S: Final = 300.0
"""Seconds that it waits while no host that could hold it answers."""
PLACE_LOOK_S: Final = 2.0
"""Seconds between two looks at hosts of which no change is known."""


@dataclass(slots=True, eq=False)
class _Waiter:
    image: str | None
    limits: Limits
    role: BenchRole
    host: RemoteHost | None = None
    placed: anyio.Event = field(default_factory=anyio.Event)


class Placement:
    """Gives environments their hosts, those with most free memory first."""

    def __init__(self, hosts: Sequence[RemoteHost]) -> None:
        self._hosts = tuple(hosts)
        self._waiting: list[_Waiter] = []
        self._changed = anyio.Event()

    async def host_for(self, image: str | None, limits: Limits, role: BenchRole = "alone") -> RemoteHost:
        """Return a host with the image and room, with that reserved; `RemoteHost.release` gives it back.

        Raises:
            ConfigError: all hosts answer, and none has the image or gives as much as `limits` ask for.
            NoSecond: they do, and none holds two of those at the same time.
            EnvironmentFault: none had room within `PLACE_S`, or none that could hold it has answered for `GONE_S`.

        Cancellation: nothing is reserved.
        """
        waiter = _Waiter(image, limits, role)
        self._waiting.append(waiter)
        try:
            await self._wait(waiter)
        except BaseException:
            if waiter.host is not None:
                waiter.host.release(limits, role)
            raise
        finally:
            if waiter in self._waiting:
                self._waiting.remove(waiter)
            self._place_waiting()  # those behind it may have waited for what it would have taken
        assert waiter.host is not None
        return waiter.host

    async def _wait(self, waiter: _Waiter) -> None:
        begin = fitted = anyio.current_time()
        while waiter.host is None:
            if all(host.state is not None for host in self._hosts):
                refuse_misfit(self._hosts, waiter.image, waiter.limits, waiter.role)
            self._place_waiting()
            with anyio.move_on_after(PLACE_LOOK_S):
                await waiter.placed.wait()
                return
            now = anyio.current_time()
            problems = [host.misfit(waiter.image, waiter.limits) for host in self._hosts]
            fitted = now if _fitting(self._hosts, waiter.image, waiter.limits, waiter.role) else fitted
            if now > begin + PLACE_S or now > fitted + GONE_S:
                said = "; ".join(problem or host.describe() for host, problem in zip(self._hosts, problems, strict=True))
                raise EnvironmentFault(
                    f"containers: no host had room within {PLACE_S:g} s, or none has answered for {GONE_S:g} s: {said}"
                )

    def look_again(self) -> None:
        """Place those that wait: a host has more room, or answers again."""
        self._changed.set()
        self._changed = anyio.Event()
        self._place_waiting()

    async def change(self) -> None:
        """Wait until a host may have more room."""
        with anyio.move_on_after(PLACE_LOOK_S):
            await self._changed.wait()

    def _place_waiting(self) -> None:
        wanted: set[RemoteHost] = set()
        for waiter in sorted(self._waiting, key=lambda waiter: waiter.role != "second"):
            fitting = _fitting(self._hosts, waiter.image, waiter.limits, waiter.role)
            free = [host for host in fitting if host not in wanted and host.has_room_for(waiter.limits, waiter.role)]
            if free:
                waiter.host = max(free, key=lambda host: host.free_mb)
                waiter.host.reserve(waiter.limits, waiter.role)
                waiter.placed.set()
                self._waiting.remove(waiter)
            else:
                wanted.update(fitting)
                if len(wanted) == len(self._hosts):
                    return


def refuse_misfit(hosts: Sequence[RemoteHost], image: str | None, limits: Limits, role: BenchRole = "alone") -> None:
    """Raise ConfigError where no host can ever open such an environment; NoSecond where none can beside its second one."""
    if _fitting(hosts, image, limits, role):
        return
    problems = [host.misfit(image, limits) for host in hosts]
    name = "the default image" if image is None else f"the image {image}"
    if None not in problems:
        said = "; ".join(problem for problem in problems if problem is not None)
        raise ConfigError(f"containers: no host can hold an environment of {name}: {said}")
    said = "; ".join(problem or host.pair_misfit(limits) or "" for host, problem in zip(hosts, problems, strict=True))
    raise NoSecond(f"containers: no host can hold two environments of {name}: {said}")


def _fitting(hosts: Sequence[RemoteHost], image: str | None, limits: Limits, role: BenchRole) -> list[RemoteHost]:
    """Return the hosts that can open such an environment, now or later."""
    fitting = [host for host in hosts if host.misfit(image, limits) is None]
    return [host for host in fitting if host.pair_misfit(limits) is None] if role == "first" else fitting
