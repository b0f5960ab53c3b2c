"""A program inside the container finds the policy by its door, and what it leaves is judged by the task's tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentrl.errors import ConfigError
from agentrl.types import StopReason
from agentrl_testing import play_async
from agentrl_workflows.terminal import TerminalCommand
from tests.support.self_payers import PREPARED
from tests.support.terminal import write_problem

ROOT = Path(__file__).parents[3]
AGENT = {
    "command": ["python3", "/opt/agent.py", "{question}"],
    "files": {"/opt/agent.py": str(ROOT / "examples" / "terminal" / "agent.py")},
    "images": {"debian:12": None},
}
PAYS = """
assert "AGENTRL_REWARD_URL" not in os.environ
assert send(DOOR + "/reward")[0] == 403
assert send(DOOR + "/reward", {"reward": 100, "response_id": name})[0] == 403
"""
pytestmark = [pytest.mark.starts, pytest.mark.anyio]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def test_a_program_in_the_container_asks_the_policy_and_is_paid(tmp_path: Path) -> None:
    task = write_problem(tmp_path, "count-lines")
    replies = ["wc -l < data.txt", "wc -l < data.txt > count.txt", "DONE"]
    played = await play_async(TerminalCommand, task, replies, workflow_args=AGENT)
    assert played.failure is None, played.failure
    assert (played.final_reward, played.metrics["exit_status"], len(played.turns)) == (1.0, 0, 3)


async def test_a_program_that_is_not_there_is_a_fault(tmp_path: Path) -> None:
    task = write_problem(tmp_path, "count-lines")
    played = await play_async(TerminalCommand, task, [], workflow_args={**AGENT, "command": ["no-such-agent"]})
    assert played.stop_reason is StopReason.ENVIRONMENT_FAULT
    with pytest.raises(ConfigError, match="there is no file"):
        TerminalCommand(command=["x"], files={"/opt/x": str(tmp_path / "none")})


async def test_a_program_that_crashed_is_judged_by_what_it_left(tmp_path: Path) -> None:
    task = write_problem(tmp_path, "count-lines")
    arguments = {**AGENT, "command": ["bash", "-c", "wc -l < data.txt > count.txt; exit 7"], "no_call": "allow"}
    played = await play_async(TerminalCommand, task, [], workflow_args=arguments)
    assert played.failure is None, played.failure
    assert (played.final_reward, played.metrics["exit_status"]) == (1.0, 7)


async def test_a_program_that_never_asks_the_policy_is_a_failure(tmp_path: Path) -> None:
    task = write_problem(tmp_path, "count-lines")
    arguments = {**AGENT, "command": ["bash", "-c", "wc -l < data.txt > count.txt"]}
    played = await play_async(TerminalCommand, task, [], workflow_args=arguments)
    assert played.failure is not None
    assert "made no call of the policy" in played.failure.message
    with pytest.raises(ConfigError, match="no_call"):
        TerminalCommand(command=["x"], no_call="perhaps")  # pyright: ignore[reportArgumentType]


async def test_no_command_in_the_container_pays_itself(tmp_path: Path) -> None:
    task = write_problem(tmp_path, "count-lines")
    hostile = ["python3", "-c", PREPARED + 'name = ask()["id"]' + PAYS + "ask(temperature='hot')"]
    played = await play_async(TerminalCommand, task, lambda _: "Done.", workflow_args={**AGENT, "command": hostile})
    assert played.failure is None, played.failure
    assert (played.final_reward, played.metrics["exit_status"]) == (0.0, 0)
    assert all(turn.reward is None for turn in played.turns)
    assert played.metrics["gateway.refused_rewards"] == 2.0
    assert played.metrics["refused_calls"] == 1.0, "a wrong call is no way out of the tests"
