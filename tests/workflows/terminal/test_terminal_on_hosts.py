"""Terminal tasks on a host of containers: the same tests, the same rewards."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentrl.errors import EnvironmentFault
from agentrl_sandbox.containers.fleet.fleet import open_fleet
from agentrl_workflows.terminal_tasks.catalog import bundled_problems
from tests.support.hosts import HOST_KEY, running_host
from tests.support.terminal import SCRIPT_LIMITS, play_script

pytestmark = [pytest.mark.anyio]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.mark.starts
async def test_a_task_on_a_host_pays_its_oracle_and_not_an_idle_agent(tmp_path: Path) -> None:
    problem = bundled_problems()[0]
    folder = problem.write(tmp_path)
    solution = (folder / "solution" / "solve.sh").read_text()
    with running_host() as (url, _):
        opened = open_fleet([url], api_key=HOST_KEY, images={"debian:12": None}, limits=SCRIPT_LIMITS)
        async with opened as fleet:
            assert (await play_script(fleet, folder, solution)).reward == 1.0
            assert (await play_script(fleet, folder, "true")).reward == 0.0


@pytest.mark.starts
async def test_tests_that_name_no_reward_are_a_fault_on_a_host_with_room_for_one(tmp_path: Path) -> None:
    folder = bundled_problems()[0].write(tmp_path)
    (folder / "tests" / "test.sh").write_text("true")
    with running_host("--max-open", "1") as (url, _):
        opened = open_fleet([url], api_key=HOST_KEY, images={"debian:12": None}, limits=SCRIPT_LIMITS)
        async with opened as fleet:
            with pytest.raises(EnvironmentFault, match="names no reward for an agent that did nothing"):
                await play_script(fleet, folder, "true")
