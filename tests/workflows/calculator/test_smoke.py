"""The smallest variant of the demo learns, through the public path; judged by steps and score, never by seconds."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from agentrl.commands.open_run import open_run
from agentrl.config import load_config
from agentrl.errors import ConfigError
from agentrl_workflows.calculator.recipe import FULL, SMOKE
from agentrl_workflows.demo.command import next_command
from agentrl_workflows.demo.run import run_demo


@pytest.mark.starts
@pytest.mark.filterwarnings("ignore::DeprecationWarning:matplotlib")
@pytest.mark.parametrize(
    "backend",
    [pytest.param("embedded", marks=pytest.mark.long), pytest.param("sglang", marks=pytest.mark.sglang)],
)
def test_the_smallest_demo_learns_and_keeps_its_invariants(tmp_path: Path, backend: str) -> None:
    out = io.StringIO()
    console = Console(file=out, width=120)
    overrides = ("--inference.backend", backend)
    outcome = run_demo(SMOKE, seed=0, runs_dir=tmp_path, name="smoke", overrides=overrides, console=console)
    summary = json.loads((tmp_path / "smoke" / "summary.json").read_text())
    assert summary["sampled_after"] >= summary["sampled_before"] + 0.1
    assert summary["train_steps"] == 15  # the recipe's engine.steps
    assert summary == json.loads(json.dumps(outcome.summary))
    assert summary["failed_evaluation_episodes"] == {"before": {}, "after": {}}
    assert summary["max_trained_staleness"] <= summary["max_staleness"] == 2
    assert summary["max_logprob_difference"] < 1e-4
    assert summary["dropped_groups"] == 0
    assert summary["failed_episodes"] == {}
    assert summary["episodes_evaluated"] == SMOKE.eval_episodes
    assert "had a busy error" in out.getvalue()
    assert (tmp_path / "smoke" / "curve.png").stat().st_size > 10_000
    assert len(open_run(tmp_path / "smoke").episodes()) == summary["train_episodes"]


def test_the_next_command_of_a_demo_starts_from_its_own_warm_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parents[3])
    command = next_command(FULL, Path("runs/demo-17")).split()
    assert command[:2] == ["agentrl", "train"]
    assert load_config(command[2], command[3:]).model.path == "runs/demo-17/warm-start"


def test_the_demo_refuses_running_servers_and_a_missing_sglang_before_it_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AGENTRL_SGLANG_PYTHON", "/nowhere/python")
    launched_only = ("--inference.device", "auto", "--inference.max_running_requests", "null")
    for overrides, expected in (
        (("--inference.backend", "sglang"), "AGENTRL_SGLANG_PYTHON: /nowhere/python is not an executable"),
        (("--inference.urls", "http://127.0.0.1:1"), "inference.urls names running ones"),
        (("--inference.urls", "http://127.0.0.1:1", *launched_only), "inference.urls: the demo starts its own servers"),
    ):
        with pytest.raises(ConfigError, match=expected):
            run_demo(SMOKE, seed=0, runs_dir=tmp_path, name="smoke", overrides=overrides)
    assert not (tmp_path / "smoke").exists()
