"""The smallest variant of the code demo learns, by rewards from the sandbox; judged by steps and score, never by seconds."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from agentrl.commands.open_run import open_run
from agentrl.errors import ConfigError
from agentrl_workflows.code_demo.recipe import CODE, CODE_SMOKE
from agentrl_workflows.demo.run import run_demo
from tests.support.sandboxes import usable_host


@pytest.mark.starts
@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore::DeprecationWarning:matplotlib")
def test_the_smallest_code_demo_learns_and_its_later_attempts_matter(tmp_path: Path) -> None:
    usable_host()
    console = Console(file=io.StringIO(), width=120)
    summary = run_demo(CODE_SMOKE, seed=0, runs_dir=tmp_path, name="smoke", console=console).summary
    assert summary["greedy_after"] >= summary["greedy_before"] + 0.2
    by_limit = summary["sampled_after_by_attempt_limit"]
    assert by_limit["1"] < by_limit["3"] == summary["sampled_after"]
    assert summary["train_steps"] == CODE_SMOKE.overrides["engine.steps"]
    assert summary["failed_episodes"] == {}
    assert summary["failed_evaluation_episodes"] == {"before": {}, "after": {}}
    assert summary["max_logprob_difference"] < 1e-4
    assert len(open_run(tmp_path / "smoke").episodes()) == summary["train_episodes"]


@pytest.mark.starts
def test_a_machine_without_a_sandbox_is_refused_before_anything_starts(tmp_path: Path) -> None:
    nowhere = ("--workflow_args.sandbox", '{"python": "/nowhere/python"}')
    with pytest.raises(ConfigError, match="/nowhere/python"):
        run_demo(CODE, seed=0, runs_dir=tmp_path, name="demo-code", overrides=nowhere)
    assert not (tmp_path / "demo-code").exists()
