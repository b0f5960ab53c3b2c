"""Episodes that hold one environment and open another never wait for each other, however full their hosts are."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import cast

import anyio
import pytest

from agentrl.errors import ConfigError
from agentrl_sandbox.containers import Containers
from agentrl_sandbox.containers.fleet.fleet import HostFleet, open_fleet
from agentrl_sandbox.containers.protocol import NoSecond
from agentrl_sandbox.containers.reserve import OpenRoles
from agentrl_sandbox.hosts.server import HostOptions, serving_host
from agentrl_sandbox.types import Limits
from tests.support.hosts import PLANNED_LIMITS, PlannedContainers, host_options, planned_fleet

pytestmark = [pytest.mark.anyio]
END_S = 60.0
LARGE = PLANNED_LIMITS.model_copy(update={"memory_mb": 512})


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(autouse=True)
def no_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let nothing look again after a time: what makes room is noticed by itself."""
    monkeypatch.setattr("agentrl_sandbox.containers.fleet.fleet.LIFE_S", 3600.0)
    monkeypatch.setattr("agentrl_sandbox.containers.fleet.placement.PLACE_LOOK_S", 3600.0)


class Episodes:
    """Episodes that each open a second environment once as many hold a first one as ever do."""

    def __init__(self, most: int) -> None:
        self.most, self.num_open, self.num_ended, self.num_seconds = most, 0, 0, 0
        self._all_hold = anyio.Event()

    async def play(self, containers: HostFleet, image: str | None = None, limits: Limits | None = None) -> None:
        async with containers.workbench(image=image, limits=limits, role="first"):
            self.num_open += 1
            assert self.num_open <= self.most
            if self.num_open == self.most:
                self._all_hold.set()
            await self._all_hold.wait()
            for _ in range(2):
                async with containers.workbench(image=image, limits=limits, role="second"):
                    self.num_seconds += 1
                    await anyio.lowlevel.checkpoint()
            self.num_open -= 1
            self.num_ended += 1


@pytest.mark.parametrize(
    ("options", "most"),
    [
        (host_options(512, max_open=4), 3),
        (host_options(512, max_open=2), 1),
        (replace(host_options(512), memory_mb=4 * 64), 3),  # a quarter of 256 MiB counts
    ],
)
async def test_a_full_host_of_episodes_that_open_a_second_environment_comes_to_its_end(
    options: HostOptions, most: int
) -> None:
    episodes = Episodes(most)
    async with planned_fleet(options, images=[()], wanted={}) as fleet:
        with anyio.fail_after(END_S):
            async with anyio.create_task_group() as tasks:
                for _ in range(3 * most):
                    tasks.start_soon(episodes.play, fleet)
    assert (episodes.num_ended, episodes.num_seconds) == (3 * most, 6 * most)


async def test_second_environments_count_for_no_cap_of_the_run() -> None:
    episodes = Episodes(2)
    async with planned_fleet(host_options(512), images=[()], wanted={}, max_open=2) as fleet:
        with anyio.fail_after(END_S):
            async with anyio.create_task_group() as tasks:
                for _ in range(6):
                    tasks.start_soon(episodes.play, fleet)
    assert episodes.num_ended == 6


async def test_two_runs_that_fill_the_same_hosts_come_to_their_end(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("fleet.LIFE_S", "placement.PLACE_LOOK_S"):  # a run hears from the hosts alone what others did there
        monkeypatch.setattr(f"agentrl_sandbox.containers.fleet.{name}", 0.01)
    episodes = Episodes(4)  # of both together: each of the two hosts keeps a place
    async with AsyncExitStack() as stack:
        urls: list[str] = []
        for _ in range(2):
            containers = cast("Containers", PlannedContainers())
            urls.append(await stack.enter_async_context(serving_host(host_options(512, max_open=3), containers=containers)))
        fleets = [await stack.enter_async_context(open_fleet(urls, limits=PLANNED_LIMITS)) for _ in range(2)]
        with anyio.fail_after(END_S):
            async with anyio.create_task_group() as tasks:
                for number in range(8):
                    tasks.start_soon(episodes.play, fleets[number % 2])
    assert episodes.num_ended == 8


async def test_a_host_keeps_room_of_the_image_and_the_size_that_its_first_environments_have() -> None:
    episodes = Episodes(4)
    two = (replace(host_options(512), memory_mb=3 * 128), host_options(512, max_open=3))
    async with planned_fleet(*two, images=[("a",), ("b",)], wanted={"a": "/srv/a", "b": "/srv/b"}) as fleet:
        with anyio.fail_after(END_S):
            async with anyio.create_task_group() as tasks:
                for _ in range(4):
                    tasks.start_soon(episodes.play, fleet, "a", LARGE)
                    tasks.start_soon(episodes.play, fleet, "b", None)
    assert episodes.num_ended == 8


async def test_environments_of_other_tasks_leave_that_room_and_take_all_where_none_needs_it() -> None:
    async with planned_fleet(host_options(512, max_open=3), images=[()], wanted={}) as fleet, AsyncExitStack() as stack:
        await stack.enter_async_context(fleet.workbench(role="first"))
        await stack.enter_async_context(fleet.workbench())
        opened: list[str] = []
        async with anyio.create_task_group() as tasks:

            async def play() -> None:
                async with fleet.workbench():
                    opened.append("alone")

            tasks.start_soon(play)
            await anyio.wait_all_tasks_blocked()
            async with fleet.workbench(role="second"):  # although another one waits already
                assert opened == []
            await stack.aclose()
        for _ in range(3):
            await stack.enter_async_context(fleet.workbench())
        assert fleet.hosts[0].num_placed == 3


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (host_options(512, max_open=1), r"holds one at a time \(--max-open\)"),
        (replace(host_options(512), memory_mb=100), r"has 100 MiB for environments \(--memory-mb\), and two count for 128"),
    ],
)
async def test_hosts_that_hold_one_environment_refuse_a_first_one_by_name(options: HostOptions, said: str) -> None:
    async with planned_fleet(options, images=[()], wanted={}) as fleet:
        with pytest.raises(NoSecond, match=f"no host can hold two environments of the default image: .*{said}"):
            async with fleet.workbench(role="first"):
                pass
        with pytest.raises(ConfigError, match="no host can hold an environment of the image x"):
            async with fleet.workbench(image="x", role="first"):
                pass
        async with fleet.workbench():
            assert fleet.hosts[0].num_placed == 1


def roles(*given: tuple[str, float]) -> OpenRoles:
    found = OpenRoles()
    for role, memory_mb in given:
        assert role in ("alone", "first", "second")
        found = found.plus(role, memory_mb)
    return found


@pytest.mark.parametrize(
    ("open_ones", "places", "memory_mb"),
    [
        ([], 0, 0),
        ([("alone", 9)], 0, 0),
        ([("first", 4), ("first", 9), ("first", 5)], 1, 9),
        ([("first", 9), ("second", 4)], 0, 5),
        ([("first", 9), ("second", 9)], 0, 0),
        ([("second", 9)], 0, 0),
    ],
)
def test_the_room_that_is_kept_is_that_of_the_largest_first_one(
    open_ones: Sequence[tuple[str, float]], places: int, memory_mb: float
) -> None:
    assert roles(*open_ones).reserve_beside("alone", 7) == (places, memory_mb)
    assert roles(*open_ones).reserve_beside("second", 7) == (0, 0)
