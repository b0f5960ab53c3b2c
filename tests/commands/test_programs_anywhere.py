"""An agent that is a program plays under `agentrl eval`, `agentrl record` and `agentrl replay`, against any endpoint."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from aiohttp import web

from agentrl import Task
from agentrl.commands.evaluate import Target, evaluate_target
from agentrl.config import RunConfig, parse_config
from agentrl.config.yaml import load_yaml
from agentrl.errors import ErrorBudgetExceeded
from agentrl_testing.commands.record import record_cassettes
from agentrl_testing.commands.replay import replay_cassettes
from tests.support.endpoints import ToolEndpoint, serving

ROOT = Path(__file__).parents[2]
COUNT = 2
pytestmark = [pytest.mark.starts, pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def make_sums() -> list[Task]:
    """Return tasks of one sum."""
    return [Task(id=f"sum-{number}", data={"question": "What is 2 + 3?", "answer": "5"}) for number in range(COUNT)]


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    """Return the run of `examples/command` with other tasks."""
    monkeypatch.chdir(ROOT)
    fields = load_yaml(Path("examples/command/run.yaml").read_text())
    tasks = {"factory": f"{__name__}:make_sums", "eval": {"factory": f"{__name__}:make_sums"}}
    return parse_config({**fields, "tasks": tasks})


async def test_the_program_is_evaluated_against_an_endpoint(example: RunConfig, tmp_path: Path) -> None:
    endpoint, report = ToolEndpoint(), tmp_path / "report.json"
    async with serving(endpoint.answer) as connection:
        target = Target(endpoint=str(connection.base_url), model="served")
        found = await evaluate_target(example, target, episodes=COUNT, output=report)
    assert (found.failed, found.success_rate) == (0, 1.0)
    assert json.loads(report.read_text())["success_rate"] == 1.0
    assert {body["model"] for body in endpoint.bodies} == {"served"}
    for episode in found.episodes:
        assert [turn.parent for turn in episode.turns] == [None, 0]
        assert episode.metrics["completion_tokens"] == 18


async def test_an_endpoint_that_refuses_is_a_failure_and_no_reward_of_zero(example: RunConfig) -> None:
    async def refuse(_request: web.Request) -> web.Response:
        return web.json_response({"error": {"message": "told to fail"}}, status=400)

    async with serving(refuse) as connection:
        target = Target(endpoint=str(connection.base_url), model="served")
        with pytest.raises(ErrorBudgetExceeded, match="told to fail"):
            await evaluate_target(example, target, episodes=1)


async def test_the_program_is_recorded_against_an_endpoint_and_replays_without_it(
    example: RunConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with serving(ToolEndpoint().answer) as connection:
        target = Target(endpoint=str(connection.base_url), model="served")
        await record_cassettes(example, tmp_path, target, task="sum-1")
    cassette = tmp_path / "sum-1-0.json"
    assert await replay_cassettes([cassette])
    capsys.readouterr()
    asks_otherwise = (
        """curl -sS --json '{"messages": [{"role": "user", "content": "Why?"}]}' "$OPENAI_BASE_URL/chat/completions" """
    )
    other = {**example.workflow_args, "command": ["sh", "-c", asks_otherwise]}
    assert not await replay_cassettes([cassette], workflow_args=other)
    assert "the workflow sent another message 1: expected" in capsys.readouterr().out
