"""A policy that drives a program cannot pay itself: what the run file names sets the reward, and nothing else."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from agentrl.errors import ConfigError
from agentrl.types import Task, Trajectory
from agentrl.workflow import load_workflow
from agentrl_testing import play
from agentrl_workflows.command import Work
from tests.support.sandboxes import usable_host
from tests.support.self_payers import PREPARED, SELF_PAYERS

COMMAND = "agentrl_workflows.command:CommandWorkflow"
TASK: dict[str, Any] = {"id": "t1", "question": "What is 6 times 7?", "answer": "42", "tests": "secret"}
ALL_OF_THEM = f"""
for source in {list(SELF_PAYERS.values())!r}:
    with suppress(Exception):
        exec(source)
"""
LARGE: Any = {"limits": {"memory_mb": 1024, "processes": 128, "address_space_mb": 65536}}
UNPAID: Any = {"grader": "agentrl_workflows.graders:number_matches"}
BY_FILES: Any = {"grader": f"{__name__}:by_files"}
BY_STATUS: Any = {"exit_rewards": {0: 0.0}}


def by_files(text: str, task: Task, work: Work) -> float:
    """Pay for a file that no hostile program writes."""
    del text
    return float(work.files.get("solution.txt") == str(task["answer"]).encode())


def ran(source: str, **settings: Any) -> Trajectory:  # noqa: ANN401
    """Play an episode whose agent is a Python program that the policy wrote."""
    given = {"command": [sys.executable, "-S", "-c", PREPARED + source], "timeout_s": 300, **settings}
    return play(load_workflow(COMMAND, given), TASK, lambda messages: "I am done.")


@pytest.mark.starts
@pytest.mark.parametrize("source", SELF_PAYERS.values(), ids=SELF_PAYERS)
def test_no_program_pays_itself(source: str) -> None:
    found = ran(source, **UNPAID)
    assert found.failure is None, found.failure
    assert found.final_reward == 0.0
    assert found.turns
    assert [turn.reward for turn in found.turns if turn.reward is not None] == []
    assert not found.reward_parts


@pytest.mark.starts
@pytest.mark.parametrize("settings", [BY_FILES, BY_STATUS], ids=["by files", "by status"])
def test_no_program_pays_itself_under_other_graders(settings: dict[str, Any]) -> None:
    found = ran(ALL_OF_THEM, **settings)
    assert found.failure is None, found.failure
    assert found.final_reward == 0.0
    assert all(turn.reward is None for turn in found.turns)
    assert found.metrics["gateway.refused_rewards"] > 50


@pytest.mark.starts
def test_no_program_pays_itself_from_the_sandbox() -> None:
    usable_host()
    found = ran("", command=["python3", "-S", "-c", PREPARED + ALL_OF_THEM], sandbox=LARGE, **UNPAID)
    assert found.failure is None, found.failure
    assert found.final_reward == 0.0
    assert all(turn.reward is None for turn in found.turns)
    assert found.metrics["gateway.refused_rewards"] > 50


@pytest.mark.starts
@pytest.mark.parametrize(
    "call",
    [
        "temperature='hot'",
        "logit_bias={'5': 100}",
        "tool_choice={'type': 'function', 'function': {'name': 'none'}}",
        "messages=[{'role': 'user', 'content': [{'type': 'image_url', 'image_url': {'url': 'data:,a'}}]}]",
        "messages=[{'role': 'user', 'content': 5}]",
        "stop=[''] * 9",
        "max_tokens=-1",
    ],
)
@pytest.mark.parametrize(("end", "reward"), [("", 0.0), ("os.kill(os.getpid(), 9)", -1.0)])
def test_no_program_escapes_its_reward_by_a_call_that_is_refused(call: str, end: str, reward: float) -> None:
    found = ran(f"ask({call})\n{end}", **UNPAID, on_crash="reward", crash_reward=-1.0)
    assert found.failure is None, found.failure
    assert (found.final_reward, found.metrics["refused_calls"]) == (reward, 1.0)


@pytest.mark.starts
def test_a_refused_call_of_a_program_that_is_trusted_to_end_well_is_a_failure() -> None:
    found = ran("ask(temperature='hot')", **UNPAID)
    assert found.failure is not None
    assert "temperature must be a number" in found.failure.message


@pytest.mark.starts
def test_a_result_file_is_the_reward_and_posts_beside_it_are_not() -> None:
    found = ran("send(DOOR + '/reward'); Path('reward.json').write_text('0.25')", result="reward.json")
    assert found.final_reward == 0.25
    assert found.metrics["gateway.refused_rewards"] == 1.0


@pytest.mark.starts
def test_a_trusted_program_rewards_with_a_secret_that_samples_nothing() -> None:
    source = """
url = os.environ["AGENTRL_REWARD_URL"]
assert KEY not in url and send(url.removesuffix("/reward") + "/v1/messages", {"messages": []})[0] == 401
assert send(DOOR + "/reward")[0] == 403
assert send(url, {"reward": 0.1, "response_id": ask()["id"]})[0] == 200
assert send(url, {"reward": {"right": True}})[0] == 200
"""
    found = ran(source, rewards="all")
    assert found.failure is None, found.failure
    assert (found.final_reward, found.turns[1].reward) == (1.0, 0.1)


@pytest.mark.starts
def test_a_program_that_may_reward_its_turns_leaves_the_final_reward_to_the_grader() -> None:
    source = """
url = os.environ["AGENTRL_REWARD_URL"]
assert send(url)[0] == 403 and send(url, {"reward": 1, "response_id": None})[0] == 403
assert send(url, {"reward": 0.1, "response_id": ask()["id"]})[0] == 200
"""
    found = ran(source, rewards="turns", **UNPAID)
    assert found.failure is None, found.failure
    assert (found.final_reward, found.turns[1].reward) == (0.0, 0.1)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rewards": "all", "grader": UNPAID["grader"]}, "workflow.grader"),
        ({"rewards": "all", "result": "reward.json"}, "workflow.result"),
        ({"rewards": "all", "exit_rewards": {0: 1.0}}, "workflow.exit_rewards"),
        ({"result": "reward.json", "grader": UNPAID["grader"]}, "both set the final reward"),
        ({"rewards": "some"}, "rewards"),
        ({"rewards": "all", "command": ["true", "{door.reward_url}"]}, "in sight"),
        ({"env": {"PAY": "{door.reward_url}"}}, "workflow.env"),
    ],
)
def test_two_sources_of_the_final_reward_are_refused_before_anything_starts(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_workflow(COMMAND, {"command": ["true"], **settings})
