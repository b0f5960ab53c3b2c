"""`agentrl.train`, `evaluate` and `serve` on a tiny checkpoint: from a script, from a running loop, and their YAML."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest
import yaml

import agentrl
from agentrl import Client, ConfigError, Task
from agentrl.commands.python.training import TrainedRun, run_blocking
from agentrl.config import parse_config
from agentrl.types import StopReason

TASKS = [{"question": f"Say {number}."} for number in range(8)]
SMALL: dict[str, Any] = {
    "sampling": {"max_tokens": 6},
    "inference": {"device": "cpu", "max_context_tokens": 256},
    "algorithm": {"group_size": 2, "groups_per_step": 2},
    "trainer": {"device": "cpu", "lr": 1e-3},
    "engine": {"steps": 1},
}


async def solve(task: Task, client: Client) -> float:
    messages = [{"role": "user", "content": task["question"]}]
    completion = await client.chat.completions.create(messages=messages)
    return len(completion.choices[0].message.content or "") / 100


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def check(trained: TrainedRun, folder: Path) -> None:
    assert trained.report.train_steps == 1
    assert trained.path == folder / "first"
    assert (trained.checkpoint / "config.json").is_file()
    assert [line["step"] for line in trained.metrics("step")] == [1]
    assert len(trained.episodes()) > 0
    assert json.loads((trained.path / "summary.json").read_text())["error"] is None
    written = yaml.safe_load(trained.config.to_yaml())
    assert parse_config(written) == trained.config
    assert written["workflow"] == f"{__name__}:solve"
    assert len((trained.path / "tasks.jsonl").read_text().splitlines()) == len(TASKS)


@pytest.mark.starts
def test_a_script_trains_in_one_call(tmp_path: Path, checkpoint: Path) -> None:
    settings: dict[str, Any] = {**SMALL, "name": "first", "runs_dir": tmp_path}
    check(agentrl.train(solve, TASKS, model=checkpoint, **settings), tmp_path)
    with pytest.raises(ConfigError, match="in Python: name=, existing='resume', existing='replace'"):
        agentrl.train(solve, TASKS, model=checkpoint, **settings)


@pytest.mark.starts
@pytest.mark.long
def test_a_script_resumes_a_run(tmp_path: Path, checkpoint: Path) -> None:
    settings: dict[str, Any] = {**SMALL, "name": "first", "runs_dir": tmp_path}
    agentrl.train(solve, TASKS, model=checkpoint, **settings)
    settings["engine"] = {"steps": 2}
    again = agentrl.train(solve, TASKS, model=checkpoint, existing="resume", **settings)
    assert again.report.train_steps == 2


@pytest.mark.starts
@pytest.mark.long
async def test_a_call_under_a_running_loop_trains_in_a_thread_of_its_own(tmp_path: Path, checkpoint: Path) -> None:
    check(agentrl.train(solve, TASKS, model=checkpoint, name="first", runs_dir=tmp_path, **SMALL), tmp_path)


@pytest.mark.starts
@pytest.mark.long
async def test_a_program_with_a_loop_awaits_the_run(tmp_path: Path, checkpoint: Path) -> None:
    check(await agentrl.train_async(solve, TASKS, model=checkpoint, name="first", runs_dir=tmp_path, **SMALL), tmp_path)


@pytest.mark.starts
async def test_a_served_checkpoint_plays_evaluates_and_answers_a_client(checkpoint: Path) -> None:
    async with agentrl.serve(checkpoint, inference=SMALL["inference"], sampling__max_tokens=6, seed=3) as policy:
        assert policy.url.startswith("http://127.0.0.1:")
        trajectory = await policy.run(solve, {"question": "Say 1."})
        assert trajectory.failure is None
        agentrl.verify(trajectory)
        report = await policy.evaluate(f"{__name__}:solve", TASKS, greedy=True)
        assert (len(report.episodes), report.failed) == (len(TASKS), 0)
        client = policy.client(seed=1)
        await client.chat.completions.create(messages=[{"role": "user", "content": "hello"}], max_tokens=3)
        assert len(client.turns[0].record.output_ids) <= 3
        client.close(StopReason.COMPLETED, final_reward=1.0)


@pytest.mark.starts
async def test_a_checkpoint_is_evaluated_on_every_task_and_leaves_nothing_behind(
    tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    report = await agentrl.evaluate(solve, TASKS, model=checkpoint, greedy=True, **SMALL)
    assert (len(report.episodes), report.failed, report.greedy) == (len(TASKS), 0, True)
    assert os.listdir() == []


def test_a_blocking_call_runs_a_job_with_and_without_a_loop() -> None:
    async def job() -> str:
        await anyio.lowlevel.checkpoint()
        return "done"

    async def inside() -> str:
        return run_blocking(job)

    assert run_blocking(job) == "done"
    assert anyio.run(inside) == "done"


async def test_an_evaluation_says_what_it_cannot_use() -> None:
    with pytest.raises(ConfigError, match="no-such-model"):
        await agentrl.evaluate(solve, TASKS, model="no-such-model")
    with pytest.raises(ConfigError, match="EXAMPLE_KEY: this environment variable is not set"):
        await agentrl.evaluate(solve, TASKS, model="m", endpoint="http://127.0.0.1:1/v1", api_key_env="EXAMPLE_KEY")
