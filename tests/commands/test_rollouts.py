"""Runs whose episodes are played in worker processes."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from agentrl.commands.rollouts import check_tasks_travel, num_workers
from agentrl.config import parse_config
from agentrl.data.load import TaskSets, TrainingTasks
from agentrl.errors import ConfigError
from agentrl.observe.runs.reading import read_record_lines
from agentrl.rollout.config import RolloutConfig
from agentrl.types import Task
from tests.support.cli import agentrl, records, write_run

GOOD = {"workflow": "my:Agent", "tasks": {"path": "t.jsonl"}, "model": {"path": "m"}}


def cores(count: int) -> Callable[[int], set[int]]:
    def available(pid: int) -> set[int]:
        return set(range(count))

    return available


def test_workers_are_one_for_each_core_but_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", cores(8))
    assert num_workers(RolloutConfig(runner="processes")) == 7
    assert num_workers(RolloutConfig(runner="processes", max_concurrent_episodes=2)) == 2
    assert num_workers(RolloutConfig(runner="processes", workers=3)) == 3
    assert num_workers(RolloutConfig(runner="ray", max_concurrent_episodes=10_000)) == 79
    monkeypatch.setattr(os, "sched_getaffinity", cores(1))
    assert num_workers(RolloutConfig(runner="processes")) == 1


@pytest.mark.parametrize("runner", ["local", "processes"])
def test_tasks_that_cannot_be_sent_are_refused_before_a_run_starts(runner: str) -> None:
    run = parse_config({**GOOD, "rollout": {"runner": runner}})
    bad = Task(id="7", data={"pair": (1, 2)})
    for sets in (TaskSets(TrainingTasks.of([bad]), ()), TaskSets(TrainingTasks.of([]), (bad,))):
        if runner == "local":
            check_tasks_travel(run, sets)
        else:
            with pytest.raises(ConfigError, match="task 7: its fields cannot be sent to a rollout worker unchanged"):
                check_tasks_travel(run, sets)


@pytest.mark.starts
@pytest.mark.long
def test_a_run_with_workers_trains_and_evaluates(tmp_path: Path, checkpoint: Path) -> None:
    write_run(
        tmp_path,
        checkpoint,
        rollout={"runner": "processes", "workers": 2},
        engine={"steps": 2, "eval_every": 2, "eval_episodes": 4},
    )
    result = agentrl(tmp_path, "train", "run.yaml")
    assert result.returncode == 0, result.stderr
    run_dir = tmp_path / "runs" / "small"
    assert [line["step"] for line in records(run_dir / "metrics.jsonl", "step")] == [1, 2]
    assert len(records(run_dir / "metrics.jsonl", "evaluation")) == 1
    assert len(list(read_record_lines(run_dir))) >= 12
    assert {log.name for log in (run_dir / "logs").glob("rollout-*.log")} == {"rollout-0.log", "rollout-1.log"}
    evaluated = agentrl(tmp_path, "eval", "run.yaml", "--episodes", "4")
    assert evaluated.returncode == 0, evaluated.stderr
    assert "4" in evaluated.stdout
    refused = agentrl(tmp_path, "eval", "run.yaml", "--endpoint", "http://127.0.0.1:9/v1", "--model", "m")
    assert refused.returncode == 2
    assert "rollout.runner: processes: workers play episodes of the policy" in refused.stderr
