"""A pool limits and reuses instances, replaces broken ones, and closes each of them once."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from agentrl.env import EnvironmentLimits, EnvironmentPool, watch_faults
from agentrl.env.pool import EnvironmentFactory
from agentrl.errors import ConfigError, EnvironmentFault, WorkflowError
from agentrl.types import Task
from tests.support.guessing import Recorded, Workshop

TASK = Task(id="t", data={"question": "Which number?"})
ANSWER = {"role": "assistant", "content": "0"}


async def play(pool: EnvironmentPool, seed: int = 0) -> None:
    async with pool.episode(TASK, seed=seed) as episode:
        while episode.end is None:
            await episode.step(ANSWER)


async def test_instances_are_kept_between_episodes_and_closed_at_the_end() -> None:
    workshop = Workshop()
    async with EnvironmentPool(workshop, name="guessing", size=2) as pool:
        for seed in range(3):
            await play(pool, seed)
        [instance] = workshop.made
        assert (instance.seeds, instance.num_closed) == ([0, 1, 2], 0)
    assert instance.num_closed == 1
    assert (pool.num_started, pool.num_faults) == (1, 0)


async def test_no_more_instances_than_the_limit_play_at_once() -> None:
    workshop = Workshop()
    async with EnvironmentPool(workshop, name="guessing", size=3) as pool, anyio.create_task_group() as tasks:
        for _ in range(10):
            tasks.start_soon(play, pool)
    assert len(workshop.made) == 3
    assert [instance.num_closed for instance in workshop.made] == [1, 1, 1]


async def test_warm_instances_are_made_before_the_first_episode() -> None:
    workshop = Workshop()
    async with EnvironmentPool(workshop, name="guessing", size=4, warm=2) as pool:
        await anyio.wait_all_tasks_blocked()
        assert len(workshop.made) == 2
        await play(pool)
        assert len(workshop.made) == 2


async def test_an_instance_is_replaced_after_so_many_episodes() -> None:
    workshop = Workshop()
    async with EnvironmentPool(workshop, name="guessing", max_episodes=2) as pool:
        for _ in range(3):
            await play(pool)
        assert [len(instance.seeds) for instance in workshop.made] == [2, 1]


async def test_outside_of_a_block_every_episode_has_an_instance_of_its_own() -> None:
    workshop = Workshop()
    pool = EnvironmentPool(workshop, name="guessing")
    for _ in range(2):
        await play(pool)
    assert [instance.num_closed for instance in workshop.made] == [1, 1]


async def test_an_instance_that_faults_in_a_step_is_closed_and_not_used_again() -> None:
    workshop = Workshop(lambda call, index: OSError("container gone") if (call, index) == ("step", 0) else None)
    async with EnvironmentPool(workshop, name="guessing") as pool:
        with pytest.raises(EnvironmentFault, match=r"guessing\.step raised OSError: container gone"):
            await play(pool)
        await play(pool)
        assert [instance.num_closed for instance in workshop.made] == [1, 0]
        assert (pool.num_started, pool.num_faults) == (2, 1)


async def test_an_instance_that_cannot_begin_is_replaced_once_without_a_fault_of_the_episode() -> None:
    workshop = Workshop(lambda call, index: OSError("gone") if call == "reset" and index in (0, 2, 3) else None)
    async with EnvironmentPool(workshop, name="guessing", max_episodes=1) as pool:
        with watch_faults() as faults:
            await play(pool)
        assert faults == {}
        assert len(workshop.made) == 2
        with watch_faults() as faults, pytest.raises(EnvironmentFault, match=r"guessing\.reset raised OSError: gone"):
            await play(pool)
        assert list(faults) == ["guessing.reset"]
        assert pool.num_faults == 3


async def test_an_instance_that_is_not_well_is_replaced_before_it_is_used_again() -> None:
    workshop = Workshop(lambda call, index: OSError("no memory") if (call, index) == ("check_health", 0) else None)
    async with EnvironmentPool(workshop, name="guessing") as pool:
        await play(pool)
        with watch_faults() as faults:
            await play(pool)
        assert faults == {}
        assert [instance.num_closed for instance in workshop.made] == [1, 0]
        assert pool.num_faults == 1


async def test_an_environment_that_cannot_be_made_is_a_fault() -> None:
    def broken() -> Recorded:
        raise OSError("no image")

    async def late() -> Recorded:
        await anyio.sleep_forever()
        raise AssertionError("unreachable")

    async def check(factory: EnvironmentFactory, message: str) -> None:
        pool = EnvironmentPool(factory, name="guessing", warm=1, limits=EnvironmentLimits(start_s=0.05))
        async with pool:
            with watch_faults() as faults, pytest.raises(EnvironmentFault, match=message):
                await play(pool)
            assert list(faults) == ["guessing.start"]
        assert (pool.num_started, pool.num_faults) == (0, 2)

    await check(broken, r"guessing\.start raised OSError: no image")
    await check(late, r"guessing\.start: no instance within 0\.05 s")


async def test_an_instance_that_is_cancelled_in_a_step_is_closed_and_the_pool_plays_on() -> None:
    stepping = anyio.Event()

    def behave(call: str, index: int) -> object:
        if (call, index) != ("step", 0):
            return None
        stepping.set()
        return anyio.sleep_forever()

    workshop = Workshop(behave)
    async with EnvironmentPool(workshop, name="guessing") as pool:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(play, pool)
            await stepping.wait()
            tasks.cancel_scope.cancel()
        await play(pool)
    assert [instance.num_closed for instance in workshop.made] == [1, 1]


async def test_all_instances_are_closed_when_the_run_is_cancelled() -> None:
    stepping: set[int] = set()
    all_stepping = anyio.Event()

    def behave(call: str, index: int) -> object:
        if call != "step":
            return None
        stepping.add(index)
        if len(stepping) == 3:
            all_stepping.set()
        return anyio.sleep_forever()

    workshop = Workshop(behave)
    with anyio.CancelScope() as scope:
        async with EnvironmentPool(workshop, name="guessing") as pool, anyio.create_task_group() as tasks:
            for _ in range(3):
                tasks.start_soon(play, pool)
            await all_stepping.wait()
            scope.cancel()
    assert [instance.num_closed for instance in workshop.made] == [1] * 3


async def test_a_context_manager_with_a_task_group_is_entered_and_left_in_one_task() -> None:
    workshop = Workshop()
    async with EnvironmentPool(workshop.managed, name="guessing", size=2) as pool, anyio.create_task_group() as tasks:
        for _ in range(4):
            tasks.start_soon(play, pool)
    assert [instance.num_closed for instance in workshop.made] == [1, 1]


@pytest.mark.parametrize("broken", ["hangs", "raises", "blames others"])
async def test_an_instance_that_does_not_close_is_abandoned_and_the_episode_stands(broken: str) -> None:
    def behave(call: str, index: int) -> object:
        if call != "close":
            return None
        if broken == "hangs":
            return anyio.sleep_forever()
        return OSError("close") if broken == "raises" else WorkflowError("close")

    workshop = Workshop(behave)
    pool = EnvironmentPool(workshop, name="guessing", limits=EnvironmentLimits(close_s=0.02))
    with watch_faults() as faults:
        await play(pool)
    assert faults == {}
    assert workshop.made[0].num_closed == 1


@pytest.mark.parametrize("numbers", [{"size": 0}, {"size": 2, "warm": 3}, {"warm": -1}, {"max_episodes": 0}])
def test_numbers_that_make_no_sense_are_refused(numbers: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="environment guessing: size must be at least 1"):
        EnvironmentPool(Workshop(), name="guessing", **numbers)
