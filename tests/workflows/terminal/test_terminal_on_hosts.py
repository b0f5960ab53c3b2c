"""Terminal tasks on a host of containers: the same tests, the same rewards."""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest

from agentrl.errors import EnvironmentFault, RunStopped
from agentrl.types import Trajectory
from agentrl_sandbox.containers.fleet.fleet import open_fleet
from agentrl_testing import call, play_async
from agentrl_workflows.terminal import TerminalAgent
from agentrl_workflows.terminal_tasks.catalog import bundled_problems
from tests.support.hosts import HOST_KEY, running_host
from tests.support.terminal import SCRIPT_LIMITS, play_script, write_problem

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


def feedback_task(tmp_path: Path) -> dict[str, str]:
    fields = write_problem(tmp_path, bundled_problems()[0].name)
    feedback = "echo $(ls /app | grep -c made) > /logs/verifier/reward.txt"
    (Path(fields["folder"]) / "tests" / "feedback.sh").write_text(feedback)
    return fields


@pytest.mark.starts
async def test_episodes_with_feedback_that_fill_a_host_all_get_theirs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOSTS_KEY", HOST_KEY)
    task, played = feedback_task(tmp_path), list[Trajectory]()
    with running_host("--max-open", "2") as (url, _):
        where = {"hosts": [url], "api_key_env": "HOSTS_KEY"}
        agent = TerminalAgent(images={"debian:12": None}, containers=where, limits={"wall_s": 300})

        async def play() -> None:
            played.append(await play_async(agent, task, [call("bash", command="touch made"), "Done."]))

        async with agent.opened(), anyio.create_task_group() as tasks:
            for _ in range(3):
                tasks.start_soon(play)
    assert [[turn.reward for turn in episode.turns] for episode in played] == [[0.5, None]] * 3


@pytest.mark.starts
async def test_a_host_with_room_for_one_refuses_a_task_with_feedback_before_its_agent_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOSTS_KEY", HOST_KEY)
    task = feedback_task(tmp_path)
    with running_host("--max-open", "1") as (url, _):
        where = {"hosts": [url], "api_key_env": "HOSTS_KEY"}
        arguments = {"images": {"debian:12": None}, "containers": where, "limits": {"wall_s": 300}}
        said = r"tests/feedback\.sh: feedback runs in a second environment .*holds one at a time \(--max-open\); let a host"
        with pytest.raises(RunStopped, match=said):
            await play_async(TerminalAgent, task, ["Done."], workflow_args=arguments)
        off = await play_async(TerminalAgent, task, ["Done."], workflow_args={**arguments, "feedback_weight": 0})
        assert off.failure is None
