"""`agentrl simulate` from the run file to the table."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agentrl.commands.running import parse_json_object
from agentrl.config import parse_config
from agentrl.errors import ConfigError
from agentrl.support.files import json_text
from agentrl_simulate.plan.simulate import SimulationOrder, describe_simulation, parse_ratio, simulate_file

GOOD: dict[str, Any] = {
    "workflow": "my:Agent",
    "tasks": {"path": "tasks.jsonl"},
    "model": {"path": "/models/Qwen3-1.7B"},
    "inference": {"backend": "sglang", "device": "cuda:1"},
    "trainer": {"device": "cuda", "dtype": "bfloat16", "gradient_checkpointing": True},
    "algorithm": {"groups_per_step": 8, "group_size": 4, "max_staleness": 1},
}
ORDER = SimulationOrder(gpus=8, steps=6)


def test_a_simulation_ranks_splits() -> None:
    report = simulate_file(parse_config(GOOD), ORDER)
    rates = [one.run.trained_tokens_per_s for one in report.predictions]
    assert rates == sorted(rates, reverse=True)
    assert len(rates) >= 3
    assert all(one.split.total <= 8 for one in report.predictions)
    text = describe_simulation(report)
    assert "not measured" in text
    assert "formula s" in text
    assert report.bottleneck in text


def test_a_ratio_plays_one_split() -> None:
    report = simulate_file(parse_config(GOOD), replace(ORDER, ratio=parse_ratio("3:1")))
    assert [(one.split.train, one.split.rollout) for one in report.predictions] == [(2, 6)]


def test_without_gpus_the_split_of_the_run_file_is_played() -> None:
    run = parse_config(GOOD, ["--inference.servers=3"])
    report = simulate_file(run, replace(ORDER, gpus=None))
    assert [(one.split.train, one.split.rollout) for one in report.predictions] == [(1, 3)]


def test_a_report_is_json() -> None:
    report = simulate_file(parse_config(GOOD), replace(ORDER, ratio=1.0))
    found = parse_json_object(json_text(report.as_json()), "report")
    [prediction] = found["predictions"]
    assert prediction["groups"]["consumed"] == 6 * 8
    assert sum(prediction["staleness_tokens"].values()) > 0
    assert set(found) == {"settings", "costs", "episodes", "predictions", "bottleneck", "driver", "advice"}


def test_advice_names_a_field_or_a_move_and_its_gain() -> None:
    run = parse_config(GOOD, ["--algorithm.max_staleness=0", "--rollout.max_concurrent_episodes=8"])
    report = simulate_file(run, replace(ORDER, ratio=3.0))
    assert report.advice
    gains = [change.gain for change in report.advice]
    assert gains == sorted(gains, reverse=True)
    assert min(gains) > 0.05
    assert any("rollout.max_concurrent_episodes: 16 (now 8)" in str(change) for change in report.advice)


@pytest.mark.parametrize(
    ("order", "flags", "message"),
    [
        (SimulationOrder(gpus=0), [], "--gpus: expected at least 1"),
        (SimulationOrder(gpus=8, steps=0), [], "--steps: expected at least 1"),
        (SimulationOrder(gpus=8, gpu="abacus"), [], "expected a GPU out of a100"),
        (SimulationOrder(gpus=8), ["--model.path=/models/unknown"], "the shape of /models/unknown is unknown"),
        (SimulationOrder(gpus=1), [], "1 GPUs cannot be split"),
        (SimulationOrder(gpus=8, fitted_from=Path("no/such/run")), [], "is no run directory"),
    ],
)
def test_bad_input_is_one_message(order: SimulationOrder, flags: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        simulate_file(parse_config(GOOD, flags), order)


@pytest.mark.parametrize("text", ["3", "3:0", "a:b", "1:2:3", ":"])
def test_a_ratio_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--split: expected"):
        parse_ratio(text)


def test_an_adapter_is_smaller_to_send_pauses_nobody_and_lets_calls_keep_it() -> None:
    lora = GOOD | {"model": {"path": "/models/Qwen3-4B"}, "trainer": {**GOOD["trainer"], "lora": {"rank": 16}}}
    merged = simulate_file(parse_config(lora), replace(ORDER, ratio=1.0))
    adapter = simulate_file(parse_config(lora | {"sync": {"adapter": "adapter"}}), replace(ORDER, ratio=1.0))
    moved = simulate_file(
        parse_config(lora, ["--sync.adapter=adapter", "--inference.pause_mode=exact"]), replace(ORDER, ratio=1.0)
    )
    assert merged.costs.update.num_bytes == 2 * 4_022_468_096
    assert adapter.costs.update.num_bytes == 4 * 33_030_144
    assert (adapter.costs.update.pause_s, adapter.shape.pins_calls, moved.shape.pins_calls) == (0.0, True, False)
    assert "126 MiB to each server" in describe_simulation(adapter)
    assert "running calls keep their adapter" in describe_simulation(adapter)
    assert "running calls continue with the new version" in describe_simulation(merged)
    full = simulate_file(parse_config(lora | {"trainer": GOOD["trainer"]}), replace(ORDER, ratio=1.0))
    assert full.costs.trainer.gpu_s_per_token > 1.2 * adapter.costs.trainer.gpu_s_per_token
