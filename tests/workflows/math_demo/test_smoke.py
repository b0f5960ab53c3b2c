"""The smallest variant of the math demo learns, through the public path; judged by steps and score, never by seconds."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from agentrl_workflows.demo.run import run_demo
from agentrl_workflows.math_demo.recipe import MATH_SMOKE


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore::DeprecationWarning:matplotlib")
@pytest.mark.starts
def test_the_smallest_math_demo_learns_to_use_its_attempts(tmp_path: Path) -> None:
    out = io.StringIO()
    run_demo(MATH_SMOKE, seed=0, runs_dir=tmp_path, name="smoke", console=Console(file=out, width=120))
    summary = json.loads((tmp_path / "smoke" / "summary.json").read_text())
    assert summary["sampled_after"] >= summary["sampled_before"] + 0.05
    assert summary["repeated_after"] < summary["repeated_before"] - 0.05
    assert list(summary["sampled_before_by_attempt_limit"]) == ["1", "2", "3"]
    assert summary["sampled_after_by_attempt_limit"]["3"] > summary["sampled_after_by_attempt_limit"]["1"]
    assert summary["failed_evaluation_episodes"] == {"before": {}, "after": {}}
    assert summary["max_logprob_difference"] < 1e-4
    assert summary["failed_episodes"] == {}
    assert "sampled, at most 3 attempt(s)" in out.getvalue()
    assert "episodes that repeat a wrong answer" in out.getvalue()
