"""Terminal tasks in containers of a real docker and podman: bundled ones, hostile agents, a poor image."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from agentrl.errors import ConfigError, RunStopped
from agentrl_sandbox.containers import Containers
from agentrl_sandbox.containers.config import containers_of, read_containers_config
from agentrl_testing import play_async
from agentrl_workflows.terminal import TerminalCommand
from tests.support.container_engines import IMAGE, Engine
from tests.support.hostile_agents import CLOSING, NAIVE, OWNED
from tests.support.terminal import (
    SCRIPT_LIMITS,
    outcomes_in,
    play_script,
    write_bundled_task,
    write_naive_task,
    write_problem,
)

pytestmark = [pytest.mark.external, pytest.mark.timeout(1800)]
BREAKING = (
    *("closed root", "closed tree", "everything removed", "what others own is moved", "what others own is closed"),
    *("what others own is removed", "no temporary directory", "names of deleted files", "links everywhere"),
    *("mounts are covered", "files that change", "memory while it packs", "killer", "logs are a link"),
)
"""Agents that break the file system which is taken over, in a few seconds each; the others meet engines by hand."""
AGENT = Path(__file__).parents[3] / "examples" / "terminal" / "agent.py"
TASKS = ("count-lines", "mend-the-median")


@asynccontextmanager
async def opened(engine: Engine) -> AsyncGenerator[Containers]:
    config = read_containers_config(engine.containers())
    async with containers_of(config, images={IMAGE: None}, limits=SCRIPT_LIMITS, max_open=8) as containers:
        yield containers


async def test_no_agent_makes_a_fault_of_its_0(engine: Engine, tmp_path: Path) -> None:
    every = {**OWNED, **CLOSING, **NAIVE}
    agents = {name: every[name] for name in BREAKING}
    async with opened(engine) as containers:
        folder = write_naive_task(tmp_path / "naive")
        assert await outcomes_in(containers, folder, {"honest": "echo 42 > answer.txt"}, 60) == {"honest": 1.0}
        assert await outcomes_in(containers, folder, agents, 60) == dict.fromkeys(BREAKING, 0.0)
    assert engine.left() == []


@pytest.mark.parametrize("name", TASKS)
async def test_the_oracle_of_a_bundled_task_is_paid_and_an_idle_agent_is_not(
    engine: Engine, name: str, tmp_path: Path
) -> None:
    folder = write_bundled_task(tmp_path, name)
    async with opened(engine) as containers:
        solve = (folder / "solution" / "solve.sh").read_text()
        assert (await play_script(containers, folder, solve)).reward == 1.0
        assert (await play_script(containers, folder, ":")).reward == 0.0


async def test_a_program_in_a_container_of_an_engine_asks_the_policy_and_is_paid(engine: Engine, tmp_path: Path) -> None:
    task = write_problem(tmp_path, "count-lines")
    arguments = {
        "command": ["python3", "/opt/agent.py", "{question}"],
        "files": {"/opt/agent.py": str(AGENT)},
        "containers": engine.containers(),
        "images": {IMAGE: None},
    }
    replies = ["wc -l < data.txt", "wc -l < data.txt > count.txt", "DONE"]
    played = await play_async(TerminalCommand, task, replies, workflow_args=arguments)
    assert played.failure is None, played.failure
    assert (played.final_reward, played.metrics["exit_status"], len(played.turns)) == (1.0, 0, 3)


async def test_an_image_that_lacks_what_a_task_needs_stops_the_run_at_once(docker_engine: Engine, tmp_path: Path) -> None:
    line = "rm /usr/bin/git; rm -rf /usr/lib/python3*/ctypes"
    docker_engine.said("run", "--name", "poor", "--network", "none", IMAGE, "sh", "-c", line)
    docker_engine.said("commit", "poor", "poor:1")
    docker_engine.said("rm", "poor")
    task = write_problem(tmp_path, "count-lines")
    arguments = {"command": ["true"], "containers": docker_engine.containers(), "images": {IMAGE: "poor:1"}}
    with pytest.raises(
        RunStopped, match=r"the image of .*count-lines.environment lacks python3 with ctypes, git, which .*count-lines needs"
    ):
        await play_async(TerminalCommand, task, [], workflow_args=arguments)


async def test_an_agent_has_the_network_of_the_run_file_where_its_task_permits_it_and_tests_have_none(
    docker_engine: Engine, tmp_path: Path
) -> None:
    docker_engine.said("network", "create", "agents")
    try:
        found: dict[str, float | None] = {}
        for mode in ("public", "no-network"):
            folder = write_naive_task(tmp_path / mode)
            with (folder / "task.toml").open("a") as file:
                file.write(f'[agent]\nnetwork_mode = "{mode}"\n')
            judge = "grep -q eth0 /proc/net/dev || grep -c eth0 /app/seen > /logs/verifier/reward.txt; true"
            (folder / "tests" / "test.sh").write_text(judge)
            arguments = {
                "command": ["cp", "/proc/net/dev", "/app/seen"],
                "no_call": "allow",
                "containers": {**docker_engine.containers(), "agent_network": "agents"},
                "images": {IMAGE: None},
            }
            task = {"question": "Look.", "folder": str(folder)}
            played = await play_async(TerminalCommand, task, [], workflow_args=arguments)
            assert played.failure is None, played.failure
            found[mode] = played.final_reward
        assert found == {"public": 1.0, "no-network": 0.0}
    finally:
        docker_engine.said("network", "rm", "agents")


@pytest.mark.parametrize("name", ["host", "container:db"])
def test_a_network_in_which_agents_reach_servers_of_the_machine_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"agent_network: expected a network such as bridge, got '{name}'"):
        read_containers_config({"backend": "docker", "image": IMAGE, "agent_network": name})
