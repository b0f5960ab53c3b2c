"""A fit recovers the costs that made the records of a run, and refuses a run without them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agentrl.episode.summary import EPISODES_HEADER, INDEX_HEADER
from agentrl.errors import ConfigError
from agentrl_simulate.costs import Fleet, RunShape
from agentrl_simulate.fitting import LEAST_STEPS, MeasuredMachines, fit_run
from agentrl_simulate.play import play_run

SHAPE = RunShape(steps=8, group_size=20, groups_per_step=2, max_staleness=1)
TOKENS_PER_S, HALF, OVERHEAD_S = 500.0, 20.0, 0.05


def write_run(folder: Path, *, steps: int = 8, timed: bool = True, cores: int | None = None) -> None:
    """Write a run whose calls follow the model of a server; `waves` of calls start together, each wave of another size."""
    rng = np.random.default_rng(0)
    records: list[dict[str, Any]] = []
    begin = 0.0
    for wave in range(60):
        count = int(rng.integers(1, 40))
        output = int(rng.integers(20, 200))
        seconds = OVERHEAD_S + output * (count + HALF) / TOKENS_PER_S
        end = begin + seconds
        records += [record(wave, member, begin, end, output, timed=timed) for member in range(count)]
        begin += seconds + 1
    episodes = folder / "episodes"
    episodes.mkdir(parents=True)
    lines = [EPISODES_HEADER, *records]
    (episodes / "step-000001.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    index = [INDEX_HEADER, *(summary(one, number) for number, one in enumerate(records, 1))]
    (episodes / "index.jsonl").write_text("".join(json.dumps(line) + "\n" for line in index))
    metrics = [step_line(number, cores) for number in range(1, steps + 1)]
    metrics.append(
        {"event": "checkpoint", "step": 3, "path": "p", "seconds": 2.5, "held_s": 0.5, "wall_s": 0, "policy_version": 3}
    )
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in metrics))


def step_line(number: int, cores: int | None) -> dict[str, Any]:
    tokens = 1000 + 100 * (number % 5)
    shared = {
        "machine_cores": cores,
        "driver_busy_cores": 0.5,
        "trainer.seconds": 0.3 + 0.0019 * tokens + 0.01 * (number % 2),
        "trainer.seconds_processor": 0.2 + 0.001 * tokens,
    }
    return {
        **({} if cores is None else shared),
        "event": "step",
        "step": number,
        "wall_s": 10.0 * number,
        "policy_version": number,
        "train_s": 0.5 + 0.002 * tokens,
        "trainer.computed_tokens": tokens,
        "trainer.seconds_spot_check": 0.1,
        "trainer_wait_s": 1.0,
        "publish_s": 0.2,
        "update_s": 0.4,
        "pause_s": 0.3,
    }


def record(group: int, member: int, start: float, end: float, output: int, *, timed: bool) -> dict[str, Any]:
    turn = {
        "context_ids": [1] * 10,
        "output_ids": [2] * output,
        "started_s": start if timed else None,
        "ended_s": end if timed else None,
    }
    return {
        "purpose": "training",
        "group": group,
        "episode_id": f"{group}.{member}.0",
        "episode_return": float(member % 2),
        "failure": None,
        "started_s": start - 0.01,
        "ended_s": end + 0.02,
        "turns": [turn],
    }


def summary(one: dict[str, Any], line: int) -> dict[str, Any]:
    empty = dict.fromkeys(("final_reward", "success", "failure", "min_version", "max_version"))
    return {
        **{name: one[name] for name in ("episode_id", "purpose", "group", "started_s", "ended_s", "episode_return")},
        **empty,
        "task_id": "t",
        "step": 1,
        "policy_version": 1,
        "turns": 1,
        "output_tokens": 1,
        "context_tokens": 1,
        "branches": 1,
        "forks": {},
        "stop_reason": "stop",
        "players": [],
        "file": "step-000001",
        "line": line,
    }


def test_a_fit_recovers_the_server_the_trainer_and_the_update(tmp_path: Path) -> None:
    write_run(tmp_path)
    fitted = fit_run(tmp_path, MeasuredMachines(servers=1, server_gpus=2, requests=None, trainer_gpus=4), SHAPE)
    server, trainer, update = fitted.costs.server, fitted.costs.trainer, fitted.costs.update
    assert server.tokens_per_s == pytest.approx(TOKENS_PER_S, rel=0.02)
    assert server.half_saturation == pytest.approx(HALF, rel=0.05)
    assert server.gpus == 2
    assert trainer.fixed_s == pytest.approx(0.5, rel=0.01)
    assert trainer.train_s(2000, 500, 4) == pytest.approx(0.5 + 0.002 * 2000, rel=0.01)
    assert fitted.costs.host.cores is None
    assert (update.publish_s, update.update_s, update.pause_s) == pytest.approx((0.2, 0.4, 0.3))
    assert update.checkpoint_s == 0.5
    assert fitted.call_error < 0.02
    assert fitted.step_s == pytest.approx(10)


def test_a_run_on_shared_cores_is_fitted_to_its_processor_seconds(tmp_path: Path) -> None:
    write_run(tmp_path, cores=2)
    machines = MeasuredMachines(servers=1, requests=None, shares_cores=True)
    fitted = fit_run(tmp_path, machines, SHAPE)
    host, trainer = fitted.costs.host, fitted.costs.trainer
    assert host.cores == 2
    factor = trainer.train_s(2000, 500, 1) / (0.2 + 0.001 * 2000)
    assert trainer.train_s(1000, 500, 1) == pytest.approx(factor * (0.2 + 0.001 * 1000), rel=0.01)
    assert host.batch_s_per_token == pytest.approx(factor * (0.19 + 0.0001 * 1400) / 1400, rel=0.05)
    pieces = 2 * sum(map(len, fitted.groups.values())) * 7 / 8
    prepared_s = host.batch_s_per_token * sum(1000 + 100 * (number % 5) for number in range(2, 9))
    assert host.turn_s * pieces + prepared_s == pytest.approx(factor * 0.5 * 70, rel=0.01)
    fleet = Fleet(servers=1, trainer_gpus=1)
    again = play_run(SHAPE, fleet, fitted.costs, fitted.source(retries=1, seed=0), warm_up=1)
    assert again.step_s == pytest.approx(fitted.step_s, rel=0.05)
    apart = fit_run(tmp_path, MeasuredMachines(servers=1, requests=None), SHAPE).costs
    assert apart.host.cores is None


def test_batches_of_one_size_are_taken_to_cost_in_proportion_to_their_tokens(tmp_path: Path) -> None:
    write_run(tmp_path)
    path = tmp_path / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    rng = np.random.default_rng(1)
    even = [
        {**line, "trainer.computed_tokens": 1000, "train_s": 2 + float(rng.normal()) / 10}
        for line in lines
        if line["event"] == "step"
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in even))
    trainer = fit_run(tmp_path, MeasuredMachines(servers=1, requests=None), SHAPE).costs.trainer
    assert trainer.fixed_s < 0.1
    assert trainer.train_s(500, 100, 1) == pytest.approx(1, rel=0.1)


def test_a_fitted_run_plays_its_own_episodes(tmp_path: Path) -> None:
    write_run(tmp_path)
    fitted = fit_run(tmp_path, MeasuredMachines(servers=1, requests=64), SHAPE)
    [attempt, _retry] = fitted.source(retries=1, seed=0).attempts(7, 0)
    lengths = {episode.output_tokens for group in fitted.groups.values() for episode in group}
    assert attempt.output_tokens in lengths
    assert attempt.after_s == pytest.approx(0.02)
    assert attempt.turns[0].outside_s >= 0.01


def test_a_run_of_few_steps_is_refused(tmp_path: Path) -> None:
    write_run(tmp_path, steps=LEAST_STEPS - 1)
    with pytest.raises(ConfigError, match="needs at least"):
        fit_run(tmp_path, MeasuredMachines(servers=1, requests=None), SHAPE)


def test_a_run_without_times_is_refused(tmp_path: Path) -> None:
    write_run(tmp_path, timed=False)
    with pytest.raises(ConfigError, match="no recorded episodes with times"):
        fit_run(tmp_path, MeasuredMachines(servers=1, requests=None), SHAPE)


def test_a_run_that_trained_nothing_is_refused_on_shared_cores_too(tmp_path: Path) -> None:
    write_run(tmp_path, cores=2)
    path = tmp_path / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    skipped = [
        {**line, "skipped": "zero_variance", "trainer.computed_tokens": 0} for line in lines if line["event"] == "step"
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in skipped))
    with pytest.raises(ConfigError, match="no step of the run trained anything"):
        fit_run(tmp_path, MeasuredMachines(servers=1, requests=None, shares_cores=True), SHAPE)
