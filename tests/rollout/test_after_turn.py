"""Workflows that raise right after a turn: counted by line, with one warning a line."""

from __future__ import annotations

import inspect
import json
import logging
from pathlib import Path

import pytest

from agentrl.client import Client
from agentrl.engine.skipped import AfterTurnErrors
from agentrl.env.faults import environment_boundary
from agentrl.servers.scripted.server import Fault, ScriptedCall, ScriptedReply
from agentrl.tokens.renderer import Renderer
from agentrl.types import EpisodeFailure, StopReason, Task, Trajectory
from tests.engine.harness import coin, lines, make_engine, run
from tests.rollout.harness import ask, episode, make_server, workflow_of


async def read_answer(task: Task, client: Client) -> float:
    return float(json.loads(await ask(client, "Write JSON.")))


async def act_first(task: Task, client: Client) -> float:
    answer = await ask(client, "Write JSON.")
    with environment_boundary("the simulator"):
        pass
    return float(json.loads(answer))


async def raise_at_once(task: Task, client: Client) -> float:
    raise ValueError("before any turn")


PARSING = f"{Path(__file__).name}:{inspect.getsourcelines(read_answer)[1] + 1}"


@pytest.mark.parametrize(("workflow", "line"), [(read_answer, PARSING), (act_first, None), (raise_at_once, None)])
async def test_the_line_that_raised_right_after_a_turn_is_recorded(
    renderer: Renderer, workflow: object, line: str | None
) -> None:
    trajectory = await episode(workflow_of(workflow), renderer)  # pyright: ignore[reportArgumentType]
    assert trajectory.stop_reason is StopReason.WORKFLOW_ERROR
    assert trajectory.failure is not None
    assert trajectory.failure.after_turn == line


async def test_a_server_that_breaks_after_a_turn_is_not_counted(renderer: Renderer) -> None:
    async def twice(task: Task, client: Client) -> float:
        await ask(client, "one")
        await ask(client, "two")
        return 1.0

    def script(call: ScriptedCall) -> ScriptedReply:
        return ScriptedReply(output="good", fault=Fault.REFUSE if call.turn else None)

    trajectory = await episode(workflow_of(twice), renderer, script=script)
    assert trajectory.failure is not None
    assert (trajectory.stop_reason, trajectory.failure.after_turn) == (StopReason.SERVER_ERROR, None)


def ended(line: str | None) -> Trajectory:
    failure = EpisodeFailure(kind="WorkflowError", message="no JSON", traceback="", after_turn=line)
    reason = StopReason.WORKFLOW_ERROR
    return Trajectory(episode_id="e", task_id="t", turns=(), stop_reason=reason, failure=failure)


def test_a_line_is_warned_about_once_above_five_percent_of_the_last_64_episodes(caplog: pytest.LogCaptureFixture) -> None:
    counted = AfterTurnErrors()
    with caplog.at_level(logging.WARNING, "agentrl"):
        for number in range(128):  # 3 of each 64
            counted.record(ended("agent.py:7" if number % 22 == 0 else None))
        assert caplog.messages == []
        for _ in range(64):
            counted.record(ended("agent.py:7"))
            counted.record(ended("tools.py:9"))
    assert [message.split(" raised")[0] for message in caplog.messages] == ["agent.py:7", "tools.py:9"]
    assert "4 of the last 64 episodes" in caplog.messages[0]
    assert counted.by_line == {"agent.py:7": 70, "tools.py:9": 64}


async def test_a_run_counts_the_lines_and_names_them_in_its_records(
    tmp_path: Path, renderer: Renderer, caplog: pytest.LogCaptureFixture
) -> None:
    def script(call: ScriptedCall) -> str:
        return "1" if coin(call) == "good" else "no JSON"

    engine = make_engine(
        tmp_path,
        renderer,
        workflow=workflow_of(read_answer),
        inference=make_server(renderer, script),
        rollout={"episode_retries": 8, "max_failure_rate": 1.0},
    )
    with caplog.at_level(logging.WARNING, "agentrl"):
        await run(engine)
    failed = lines(tmp_path / "metrics.jsonl", "episode_failed")
    assert {line["after_turn"] for line in failed} == {PARSING}
    last = lines(tmp_path / "metrics.jsonl", "step")[-1]
    assert last[f"raised_after_turn.{PARSING}"] == last["failed_episodes.workflow_error"] > 0
    assert sum(message.startswith(f"{PARSING} raised right after a model turn") for message in caplog.messages) == 1
